"""What surrounds the lanes: start-up, data, progress, the check, and the one message when something fails.

Importing it opens standard streams that are closed: before torch opens anything.
"""

from chimera_runtime.tools.streams import open_closed

open_closed()
