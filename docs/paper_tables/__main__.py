"""The paper's tables, compiled: ``python docs/paper_tables``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from paper_tables.tables import main

    main()
