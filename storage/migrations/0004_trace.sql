-- The trace context a message goes out with, as a header of it: not part of what it says.
ALTER TABLE outbox ADD COLUMN traceparent TEXT;
