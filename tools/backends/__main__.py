"""Build the backends that the cache lacks."""

import sys

from tools.backends import BuildError, build_all

if __name__ == "__main__":
    try:
        build_all()
    except BuildError as error:
        sys.exit(str(error))
