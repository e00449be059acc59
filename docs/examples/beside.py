"""A prediction beside profiles of torch: python beside.py PREDICTED RANK_FILE .. > both.json, for Perfetto.

PREDICTED is the output of ``chimera compile .. --emit trace``, each RANK_FILE was written by ``train.py
--torch-profile``. The prediction begins where the ranks begin the first operation that both have.
"""

import json
import sys
from pathlib import Path

predicted, *measured = (json.loads(Path(name).read_text())["traceEvents"] for name in sys.argv[1:])
starts: dict[str, float] = {}
for event in (event for profile in measured for event in profile if event["ph"] == "X"):
    starts[event["name"]] = min(event["ts"], starts.get(event["name"], event["ts"]))
shared = [event for event in predicted if event["ph"] == "X" and event["name"] in starts]
if not shared:
    sys.exit(f"{sys.argv[1]}: no operation is in {', '.join(sys.argv[2:])}: another schedule was profiled")
first = min(shared, key=lambda event: event["ts"])
later = starts[first["name"]] - first["ts"]
moved = [event | {"ts": event["ts"] + later} if "ts" in event else event for event in predicted]
json.dump({"traceEvents": [*moved, *(event for profile in measured for event in profile)]}, sys.stdout)
