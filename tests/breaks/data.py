"""Breaks of stored tokens, streams, texts, prompts, sources and the folder of a teacher's cache."""

from __future__ import annotations

from breaks import Break

DATA = "llmdistill/data"
TESTS = "tests/unit/data"

BREAKS = [
    Break(
        "stored-length-of-the-neighbor",
        f"{DATA}/columns.py",
        "return len(self._tokens[index])",
        "return len(self._tokens[index - 1])",
        f"{TESTS}/test_columns.py::test_what_is_written_is_read",
    ),
    Break(
        "stored-set-is-copied",
        f"{DATA}/columns.py",
        "pa.memory_map(str(file))",
        "pa.OSFile(str(file))",
        f"{TESTS}/test_columns.py::test_an_example_is_made_only_when_it_is_asked_for",
    ),
    Break(
        "stored-prompt-in-the-answer",
        f"{DATA}/example_store.py",
        "ids[prompt_length:].tolist()",
        "ids.tolist()",
        f"{TESTS}/test_example_store.py::test_items_are_those_of_encode",
    ),
    Break(
        "damaged-tokens-used",
        f"{DATA}/store.py",
        "and manifest_damage(folder) is None",
        "",
        f"{TESTS}/test_example_store.py::TestCache::test_what_is_damaged_is_made_anew",
    ),
    Break(
        "tokens-of-another-tokenizer",
        f"{DATA}/corpus.py",
        '"tokenizer": tokenizer_fingerprint(tokenizer),',
        "",
        f"{TESTS}/test_corpus.py::TestCache::test_what_decides_is_tokenized_anew",
    ),
    Break(
        "one-document-too-late",
        f"{DATA}/corpus.py",
        "end = ceil(group * every)",
        "end = ceil((group + 1) * every)",
        f"{TESTS}/test_corpus.py::TestFraction",
    ),
    Break(
        "stream-epochs-alike",
        f"{DATA}/stream.py",
        "default_rng((self.share.seed, epoch))",
        "default_rng(self.share.seed)",
        f"{TESTS}/test_stream.py::test_each_epoch_is_a_permutation_and_batches_straddle_epochs",
    ),
    Break(
        "stream-places-of-rank-0",
        f"{DATA}/stream.py",
        "(rank + place * exchange.size for place in data.kept)",
        "(place + rank * len(data.kept) for place in data.kept)",
        f"{TESTS}/test_stream.py::TestSharedAmongRanks::test_the_batches_are_those_of_one_rank",
    ),
    Break(
        "stream-error-of-the-last-rank",
        f"{DATA}/stream.py",
        "min(failures).message",
        "max(failures).message",
        f"{TESTS}/test_stream.py::TestSharedAmongRanks::test_a_mistake_is_that_of_one_rank",
    ),
    Break(
        "stream-goes-on-after-an-error",
        f"{DATA}/stream.py",
        "            # A generator that has failed ends silently when it is used again.\n            self._restart()\n",
        "",
        f"{TESTS}/test_stream.py::TestLongPrompts::test_stop_with_their_source",
    ),
    Break(
        "prefetched-step-is-any",
        f"{DATA}/prefetch.py",
        "ahead is not None and ahead[0] == step",
        "ahead is not None",
        f"{TESTS}/test_prefetch.py::test_another_step_than_the_next_is_made_anew",
    ),
    Break(
        "masks-alike-in-every-epoch",
        f"{DATA}/text.py",
        "default_rng((seed, epoch, index, 1, *part))",
        "default_rng((seed, index, 1, *part))",
        f"{TESTS}/test_text.py::TestOrder::test_each_epoch_masks_other_tokens_even_within_a_batch",
    ),
    Break(
        "pieces-forget-the-separators",
        f"{DATA}/layouts.py",
        "return self._corpus.first_token(document) + document * len(self._between)",
        "return self._corpus.first_token(document)",
        f"{TESTS}/test_text.py::TestDecoders",
    ),
    Break(
        "other-document-is-the-same",
        f"{DATA}/layouts.py",
        "index if index < self._spans[document] else index + own",
        "index",
        f"{TESTS}/test_text.py::TestPairs::test_second_segments_follow_or_come_from_another_document",
    ),
    Break(
        "truncated-prompt-keeps-its-beginning",
        f"{DATA}/instruct.py",
        "start + ids[len(ids) - length + len(start) :]",
        "ids[:length]",
        f"{TESTS}/test_instruct.py::TestEncode::test_truncation_keeps_the_end_and_the_start_token",
    ),
    Break(
        "turns-end-as-texts",
        f"{DATA}/chat.py",
        "next((index for index in ids if index in added), end)",
        "end",
        f"{TESTS}/test_prompts.py::TestTokens::test_an_answer_ends_as_the_prompt_wants_it",
    ),
    Break(
        "cells-are-guessed",
        f"{DATA}/sources.py",
        '"keep_default_na": False',
        '"keep_default_na": True',
        f"{TESTS}/test_sources.py::TestTables::test_cells_of_csv_stay_text",
    ),
    Break(
        "slice-longer-by-its-start",
        f"{DATA}/sources.py",
        'int(part["stop"]) - start',
        'int(part["stop"])',
        f"{TESTS}/test_sources.py::TestHub::test_streaming_cuts_by_numbers",
    ),
    Break(
        "target-sees-itself-to-come",
        f"{DATA}/targets.py",
        "np.arange(1, len(item) + 1)",
        "np.arange(2, len(item) + 2)",
        f"{TESTS}/test_targets.py::test_what_each_token_sees_and_its_segment",
    ),
    Break(
        "cache-rows-of-the-first-shard",
        "llmdistill/teacher/cache_folder.py",
        "offsets[shard][number : number + 2]",
        "offsets[0][number : number + 2]",
        "tests/unit/run/test_cache.py::test_hidden_states_give_the_divergence_of_plain_torch",
    ),
]
