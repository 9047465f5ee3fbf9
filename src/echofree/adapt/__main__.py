"""python -m echofree.adapt"""

from __future__ import annotations

import sys

from echofree.adapt import main

if __name__ == "__main__":
    sys.exit(main())
