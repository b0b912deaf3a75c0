"""ROUGE-L of a model's answers to instruction sets.

python eval/instruct.py --model DIR --suite dolly,self_inst,vicuna [--data_dir DIR] [--json]
python eval/instruct.py --model DIR --data FILE [FILE...] [--decoding greedy] [--output DIR] [--limit N] [--json]
deepspeed --num_gpus 2 eval/instruct.py --model DIR --data FILE [FILE...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout itself is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in llmdistill/train.py

from llmdistill.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main(prog="eval/instruct.py"))
