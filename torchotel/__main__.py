"""`python -m torchotel`."""

import sys

from torchotel.cli import main

if __name__ == "__main__":
    sys.exit(main())
