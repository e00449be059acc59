"""What surrounds the lanes: start-up, data, progress, the check, and the one message when something fails.

Importing it opens standard streams that are closed, and notes which process started this one: before torch opens
anything, and takes seconds to be imported.
"""

from chimera_runtime.tools import parent as parent
from chimera_runtime.tools.streams import open_closed

open_closed()
