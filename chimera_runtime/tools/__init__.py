"""Tools around the training loop of train.py: options, messages about failures, records, progress and the check.

Importing it opens standard streams that are closed, and notes which process started this one: before torch opens
anything, and takes seconds to be imported. Until a rank listens to signals (`Faults.watch_signals`), Ctrl-C ends it
without a traceback.
"""

import os
import signal
import threading

from chimera_runtime.tools.open import parent as parent
from chimera_runtime.tools.open.stdio import open_closed

open_closed()
if "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
