-- Full text of what was indexed. scope holds one token per run, so that a common word of other runs costs
-- nothing; the text is kept because rows of a forgotten run must be deletable.
CREATE VIRTUAL TABLE search USING fts5 (
    scope, text, position UNINDEXED, event_id UNINDEXED, type UNINDEXED,
    tokenize = 'unicode61 remove_diacritics 2'
);
CREATE TABLE search_rows (
    run_no INTEGER NOT NULL REFERENCES runs,
    row    INTEGER NOT NULL,
    PRIMARY KEY (run_no, row)
) STRICT, WITHOUT ROWID;
CREATE TABLE search_through (
    run_no   INTEGER PRIMARY KEY REFERENCES runs,
    position INTEGER NOT NULL
) STRICT;
