"""CoNLL-2000: what each layer of encoders knows of phrases, teacher and students side by side (MiniLM Table 10).

python eval/conll2000.py --model runs/minilm --data train.txt
python eval/conll2000.py --model teacher=google-bert/bert-base-uncased,student=runs/minilm --data train.txt [--json]
"""

from __future__ import annotations

import sys

from llmdistill.commands.side_by_side import main

if __name__ == "__main__":
    sys.exit(main("conll2000", prog="eval/conll2000.py"))
