"""Tools around the training loop of train.py: options, messages about failures, records, progress and the check.

Importing this package opens standard streams that are closed, and notes which process started this one. Both come
before the import of torch, which opens files and takes seconds. Until a rank listens to signals
(`Faults.watch_signals`), Ctrl-C ends it without a traceback.
"""

import os
import signal
import threading

from chimera_runtime.tools.open.stdio import open_closed

open_closed()
if "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
