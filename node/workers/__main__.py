"""`python -m node.workers`: one worker, started by a node (`process.py`)."""

import sys

from node.workers.worker import main

sys.exit(main())
