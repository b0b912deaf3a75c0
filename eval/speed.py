"""Models side by side: parameters of embedding and layers, seconds for 100 batches, speed-up (MiniLM Table 4).

python eval/speed.py --model bert-base-uncased --shapes 6x768x12,12x384x12,6x384x12,4x384x12,3x384x12
python eval/speed.py --model bert-base-uncased,runs/kroneckerbert/student --batch_size 64 --training true [--json]
"""

from __future__ import annotations

import sys

from llmdistill.commands.side_by_side import main

if __name__ == "__main__":
    sys.exit(main("speed", prog="eval/speed.py"))
