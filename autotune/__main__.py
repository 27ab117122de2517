"""``python -m autotune`` is ``ringtune``, also where nothing is installed."""

import sys

from .cli import main

sys.exit(main())
