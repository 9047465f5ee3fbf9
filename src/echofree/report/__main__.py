"""python -m echofree.report"""

from __future__ import annotations

import sys

from echofree.report import main

if __name__ == "__main__":
    sys.exit(main())
