"""The page on conformance: ``python docs/conformance > docs/evidence/conformance.md``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from conformance.page import page

    sys.stdout.write(page())
