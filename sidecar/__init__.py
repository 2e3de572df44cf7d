"""The daemon: reads the stream, keeps the ledger, compacts, answers, publishes. Decisions are in ``core``."""
