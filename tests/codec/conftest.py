"""Let the tests of the codec import their zoo by its name, which is part of the names of its types."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
