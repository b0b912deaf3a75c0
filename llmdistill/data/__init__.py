"""From files to batches.

Instructions pass through `references` (which files), `sources` and `readers` (rows), `chat_messages` and `rows`
(examples), `prompts` and `chats` (texts), `instruct` (tokens), `stored_examples` or `stream`, `sampler` (which examples
a step has) and `collate` (a batch).

Plain text passes through `corpus` (tokens), `sequences`, `masking` and `text` (a batch). Tasks begin with
`pairs`, `questions` or `targets`. `store` writes and maps all tokens on disk.
"""
