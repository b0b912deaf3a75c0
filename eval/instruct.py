"""ROUGE-L of a model's answers to instruction sets.

python eval/instruct.py --model DIR --suite dolly,self_inst,vicuna [--data_dir DIR] [--json]
python eval/instruct.py --model DIR --data FILE [FILE...] [--decoding greedy] [--output DIR] [--limit N] [--json]
deepspeed --num_gpus 2 eval/instruct.py --model DIR --data FILE [FILE...]
"""

from __future__ import annotations

import sys

from llmdistill.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main(prog="eval/instruct.py"))
