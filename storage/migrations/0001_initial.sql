-- Lanes, runs, the append-only journal, ledgers, compaction, outbox, identity segments.
-- Rows of a run carry its small integer; texts are stored once.

CREATE TABLE lanes (
    lane_no        INTEGER PRIMARY KEY,
    tenant         TEXT NOT NULL,
    lane           TEXT NOT NULL,
    stream_seq     INTEGER,
    stream_created TEXT,
    UNIQUE (tenant, lane)
) STRICT;

CREATE TABLE runs (
    run_no     INTEGER PRIMARY KEY,
    lane_no    INTEGER NOT NULL REFERENCES lanes,
    run        TEXT NOT NULL,
    family     TEXT NOT NULL,
    parent     TEXT,
    finished   INTEGER NOT NULL DEFAULT 0 CHECK (finished IN (0, 1)),
    last_entry INTEGER NOT NULL DEFAULT 0,
    version    INTEGER NOT NULL DEFAULT 0,
    position   INTEGER NOT NULL DEFAULT 0,
    chain      BLOB NOT NULL CHECK (length(chain) = 32),
    -- Before head: a listing of views must not read the overflow pages of heads.
    view       BLOB NOT NULL DEFAULT x'',
    head       BLOB NOT NULL DEFAULT x'',
    UNIQUE (lane_no, run)
) STRICT;
CREATE INDEX runs_by_family ON runs (lane_no, family);

-- The journal. Rows come in commit order and point back to the run's previous row, so that no index grows
-- in random order with history. identity is the 64-bit key of (tenant, lane, run, channel, id), less 2^63.
CREATE TABLE heads (
    entry      INTEGER PRIMARY KEY,
    run_no     INTEGER NOT NULL REFERENCES runs,
    prev       INTEGER NOT NULL,
    version    INTEGER NOT NULL,
    position   INTEGER NOT NULL CHECK (position >= 0),
    channel    INTEGER NOT NULL CHECK (channel BETWEEN 0 AND 2),
    stream_seq INTEGER NOT NULL,
    event_id   TEXT NOT NULL,
    type       TEXT NOT NULL,
    sha256     BLOB NOT NULL CHECK (length(sha256) = 32),
    chain      BLOB NOT NULL CHECK (length(chain) = 32),
    identity   INTEGER NOT NULL,
    -- sha256 of the kept body where it was redacted, else NULL.
    kept       BLOB CHECK (kept IS NULL OR length(kept) = 32)
) STRICT;
CREATE TRIGGER heads_no_update BEFORE UPDATE ON heads
BEGIN SELECT RAISE(ABORT, 'journal heads are append-only'); END;
-- INSERT OR REPLACE reaches this one too, on connections with recursive_triggers.
CREATE TRIGGER heads_no_delete BEFORE DELETE ON heads
BEGIN SELECT RAISE(ABORT, 'journal heads are append-only'); END;

CREATE TABLE bodies (
    entry INTEGER PRIMARY KEY REFERENCES heads,
    body  BLOB NOT NULL
) STRICT;

-- A way into the middle of a long run: one row per 256 of its versions.
CREATE TABLE marks (
    run_no   INTEGER NOT NULL REFERENCES runs,
    version  INTEGER NOT NULL,
    position INTEGER NOT NULL,
    entry    INTEGER NOT NULL,
    PRIMARY KEY (run_no, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE tombstones (
    run_no       INTEGER PRIMARY KEY REFERENCES runs,
    forgotten_at TEXT NOT NULL,
    body         BLOB NOT NULL
) STRICT;

CREATE TRIGGER bodies_no_update BEFORE UPDATE ON bodies
BEGIN SELECT RAISE(ABORT, 'journal bodies are never changed'); END;
CREATE TRIGGER bodies_no_delete BEFORE DELETE ON bodies
WHEN NOT EXISTS (
    SELECT 1 FROM heads JOIN tombstones USING (run_no) WHERE heads.entry = OLD.entry
)
BEGIN SELECT RAISE(ABORT, 'a body goes only with the tombstone of its run'); END;

CREATE TABLE items (
    run_no INTEGER NOT NULL REFERENCES runs,
    kind   TEXT NOT NULL,
    key    TEXT NOT NULL,
    live   INTEGER NOT NULL CHECK (live IN (0, 1)),
    body   BLOB NOT NULL,
    PRIMARY KEY (run_no, kind, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE attempts (
    run_no           INTEGER NOT NULL REFERENCES runs,
    attempt_id       TEXT NOT NULL,
    cause            TEXT NOT NULL,
    first            INTEGER NOT NULL,
    through          INTEGER NOT NULL,
    range_digest     TEXT NOT NULL,
    handoff_position INTEGER NOT NULL,
    ledger_digest    TEXT NOT NULL,
    started_at       TEXT NOT NULL,
    open             INTEGER NOT NULL DEFAULT 1 CHECK (open IN (0, 1)),
    body             BLOB NOT NULL,
    PRIMARY KEY (run_no, attempt_id)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX attempts_open ON attempts (run_no) WHERE open = 1;

CREATE TABLE checkpoints (
    checkpoint_no  INTEGER PRIMARY KEY,
    run_no         INTEGER NOT NULL REFERENCES runs,
    chain          TEXT NOT NULL CHECK (chain IN ('live', 'shadow')),
    version        INTEGER NOT NULL CHECK (version > 0),
    checkpoint_id  TEXT NOT NULL,
    parent_id      TEXT,
    covers_through INTEGER NOT NULL,
    event_id       TEXT NOT NULL,
    range_digest   TEXT NOT NULL,
    created_at     TEXT NOT NULL,
    body           BLOB NOT NULL,
    UNIQUE (run_no, chain, version),
    UNIQUE (run_no, checkpoint_id)
) STRICT;
-- Rows live only inside the transaction that adopts another owner's chain for the run.
CREATE TABLE permits (run_no INTEGER PRIMARY KEY REFERENCES runs) STRICT;
CREATE TRIGGER checkpoints_no_update BEFORE UPDATE ON checkpoints
BEGIN SELECT RAISE(ABORT, 'checkpoints are append-only'); END;
CREATE TRIGGER checkpoints_no_delete BEFORE DELETE ON checkpoints
WHEN NOT EXISTS (SELECT 1 FROM tombstones WHERE run_no = OLD.run_no)
 AND NOT EXISTS (SELECT 1 FROM permits WHERE run_no = OLD.run_no)
BEGIN SELECT RAISE(ABORT, 'checkpoints are append-only'); END;

CREATE TABLE receipts (
    receipt_no INTEGER PRIMARY KEY,
    run_no     INTEGER NOT NULL REFERENCES runs,
    receipt_id TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    outcome    TEXT NOT NULL,
    created_at TEXT NOT NULL,
    body       BLOB NOT NULL,
    UNIQUE (run_no, receipt_id)
) STRICT;

-- AUTOINCREMENT: a reader keeps the last id it saw, so an id is never given twice.
CREATE TABLE outbox (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    lane_no INTEGER NOT NULL REFERENCES lanes,
    stream  TEXT NOT NULL CHECK (stream IN ('out', 'state', 'rejected')),
    subject TEXT NOT NULL,
    msg_id  TEXT NOT NULL,
    payload BLOB NOT NULL
) STRICT;
CREATE INDEX outbox_by_lane ON outbox (lane_no);

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT, WITHOUT ROWID;

-- Identity of old messages: sorted (key, entry) pairs in blocks, with a small filter kept in memory.
-- state: 0 in use, 1 replaced by a merged one, 2 being built; 1 and 2 are dropped at start.
CREATE TABLE id_segments (
    segment    INTEGER PRIMARY KEY,
    level      INTEGER NOT NULL,
    state      INTEGER NOT NULL CHECK (state BETWEEN 0 AND 2),
    count      INTEGER NOT NULL,
    last_entry INTEGER NOT NULL,
    filter     BLOB NOT NULL
) STRICT;
-- block = segment * 2^24 + number of the block in it.
CREATE TABLE id_blocks (
    block INTEGER PRIMARY KEY,
    pairs BLOB NOT NULL
) STRICT;
