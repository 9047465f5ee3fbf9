"""python -m echofree.federate"""

from __future__ import annotations

import sys

from echofree.federate import main

if __name__ == "__main__":
    sys.exit(main())
