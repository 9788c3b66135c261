"""The wheel in an empty environment, as a newcomer has it: `make smoke PYTHON=python3.13`, some minutes and gigabytes.

It is built, installed with the versions of constraints.txt and without extras, and used from an empty folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = ["good", "lovely", "bad", "awful", "film", "shop", "it", "was"]
BACKBONE = f"""
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *{WORDS}]
made = Tokenizer(models.WordLevel({{word: i for i, word in enumerate(words)}}, unk_token="[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained("tiny")
hf.BertModel(hf.BertConfig(vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=48)).save_pretrained("tiny")
"""
IMPORT = "import taskgraft as tg; print(tg.__version__, tg.__file__)"


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        venv.create(folder / "venv", with_pip=True)
        binaries, empty = folder / "venv" / "bin", folder / "empty"
        empty.mkdir()

        def run(*command: str, code: int = 0) -> str:
            clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
            words = [str(binaries / command[0]), *command[1:]]
            done = subprocess.run(words, cwd=empty, env=clean, capture_output=True, text=True, check=False)
            if done.returncode != code:
                sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
            return done.stdout + done.stderr

        run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
        wheel = next(folder.glob("*.whl"))
        run("pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel))
        run("pip", "check")
        version, place = run("python", "-c", IMPORT).split()
        assert wheel.name == f"taskgraft-{version}-py3-none-any.whl" and Path(place).is_relative_to(folder), place
        assert run("taskgraft", "--version").split() == ["taskgraft", version]
        assert "train" in run("taskgraft", "--help")
        run("python", "-c", BACKBONE)
        rows = [f"it was {word} {n},{'yes' if word in WORDS[:2] else 'no'}" for n in range(10) for word in WORDS[:4]]
        (empty / "mood.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        trained = run("taskgraft", "train", "mood.csv", "--backbone", "tiny", "--epochs", "2", "--json")
        answer = json.loads(run("taskgraft", "predict", "mood", "it was lovely").splitlines()[-1])
        assert answer["label"] in ("yes", "no") and "Saved" in trained
        assert "pip install 'taskgraft[serve]'" in run("taskgraft", "serve", code=2)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, works on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
