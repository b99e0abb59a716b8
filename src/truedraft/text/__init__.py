"""Between text and token ids: tokenizer, incremental detokenising, stop texts. The engine sees ids only."""
