"""``python -m sidecar`` is ``watchkeeper``."""

from sidecar.cli import main

main()
