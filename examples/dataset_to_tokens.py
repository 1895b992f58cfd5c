"""Make a file of tokens of a data set that the package datasets has saved, for `--data`.

    pip install datasets tokenizers
    python examples/dataset_to_tokens.py DATASET TOKENIZER tokens.npy [END_OF_DOCUMENT]
    graphfsdp train --data tokens.npy --hf-model MODEL_FOLDER

Nothing is downloaded: `save_to_disk` has written the data set, and the tokenizer's folder has a
`tokenizer.json`. A data set with a column `input_ids` is taken as it is. The tokens of all
documents lie behind each other in one file, which is mapped while it is trained on.
"""

import sys
from pathlib import Path

import datasets
import numpy as np
from tokenizers import Tokenizer

BATCH = 1000  # documents at a time
source, tokenizer_folder, target = sys.argv[1:4]
tokenizer = Tokenizer.from_file(str(Path(tokenizer_folder) / "tokenizer.json"))
end = sys.argv[4] if len(sys.argv) > 4 else "<|endoftext|>"
eod = tokenizer.token_to_id(end)
if eod is None:
    sys.exit(f"{tokenizer_folder} has no token {end!r}; name the one that ends a document")

found = datasets.load_from_disk(source)
parts = found.values() if isinstance(found, datasets.DatasetDict) else [found]
unfinished = Path(target).with_suffix(".unfinished")
num_tokens = num_documents = 0
with unfinished.open("wb") as file:
    for rows in (rows for part in parts for rows in part.iter(BATCH)):
        documents = rows.get("input_ids")
        if documents is None:
            documents = [encoded.ids for encoded in tokenizer.encode_batch(rows["text"])]
        for document in documents:
            tokens = np.asarray([*document, eod], dtype=np.uint32)
            tokens.tofile(file)
            num_tokens += len(tokens)
            num_documents += 1
np.save(target, np.memmap(unfinished, dtype=np.uint32, mode="r"))
unfinished.unlink()
print(f"{num_tokens:,} tokens of {num_documents:,} documents, each ended by {eod}, in {target}")
