"""python -m echofree.doctor"""

from __future__ import annotations

import sys

from echofree.doctor import main

if __name__ == "__main__":
    sys.exit(main())
