-- Full text of what was indexed. scope holds one token per run, so that a common word of other runs costs
-- nothing; the text is kept because rows of a forgotten run must be deletable.
CREATE VIRTUAL TABLE search USING fts5 (scope, text, tokenize = 'unicode61 remove_diacritics 2');
-- What a hit is filtered by stands apart: to reach a column behind a long text all its pages are read.
CREATE TABLE search_rows (
    run_no   INTEGER NOT NULL REFERENCES runs,
    row      INTEGER NOT NULL,
    position INTEGER NOT NULL,
    event_id TEXT NOT NULL,
    type     TEXT NOT NULL,
    PRIMARY KEY (run_no, row)
) STRICT, WITHOUT ROWID;
CREATE TABLE search_through (
    run_no   INTEGER PRIMARY KEY REFERENCES runs,
    position INTEGER NOT NULL
) STRICT;
