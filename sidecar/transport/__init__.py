"""The broker: connection, streams, ownership of lanes, fenced writes. The only place that knows NATS."""
