-- The newest packet of a run that shortened its context, as it was published: what the agent's message list
-- begins with until the next one.
CREATE TABLE packets (
    run_no    INTEGER PRIMARY KEY REFERENCES runs,
    packet_id TEXT NOT NULL,
    body      BLOB NOT NULL
) STRICT;
