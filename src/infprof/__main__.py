"""``python -m infprof`` is ``infprof``."""

from infprof.cli import main

if __name__ == "__main__":
    main()
