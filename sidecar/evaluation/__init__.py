"""Whether a run goes on as well after compaction as before: scenarios with known answers, and transcripts.

`watchkeeper evaluate` compares what several ways of shortening a history leave to go on with; `watchkeeper
verify` restores one saved case and lists what is still forbidden. Watchkeeper itself is measured as it is:
real storage, fold, compaction and answers, only without a broker. Nothing here decides about runs, and nothing
here is used by the daemon.
"""
