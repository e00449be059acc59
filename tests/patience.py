"""How long tests wait for what they start, in seconds; only what hangs is waited for so long.

TESTS_PATIENCE=3 make test        # three times as long, where a machine is slow or busy
"""

import os

FACTOR = float(os.environ.get("TESTS_PATIENCE", "1"))

PATIENCE = 400 * FACTOR
"""For a process to end."""
