"""SQuAD 1.1 and 2.0, and MLQA: fine-tune a model, choose on dev, report exact match and F1 over seeds.

python eval/squad.py --model DIR --data_dir questions [--tasks squad2] [--protocol minilmv2] [--json]
python eval/squad.py --model DIR --data_dir questions --tasks squad2 --teacher runs/glue/TEACHER --method kd
deepspeed --num_gpus 2 eval/squad.py --model DIR --data_dir questions --tasks mlqa
"""

from __future__ import annotations

import sys

from llmdistill.commands.fine_tuning import main

if __name__ == "__main__":
    sys.exit(main(["--tasks", "squad1,squad2", *sys.argv[1:]], prog="eval/squad.py"))
