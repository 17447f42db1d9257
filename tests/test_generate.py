"""Text from a Hugging Face folder and from a run's checkpoint: what transformers makes of the same weights, and honest sampling."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from ranks_init_from import fit
from ranks_resume import Layout

from lightning_3d.__main__ import main
from lightning_3d.checkpoint.export import export
from lightning_3d.errors import ConfigError
from lightning_3d.generate import Source, keep_likely, sampler, stream
from lightning_3d.model import cache
from lightning_3d.model.cache import Decoder
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage
from lightning_3d.testing import RankPool

DATA = Path(__file__).parent / "data"
NANOSET, TOKENIZER = DATA / "nanoset_datatrove", str(DATA / "tokenizer_bpe512")
UNTIED = DATA / "hf_llama_mha_untied"


@pytest.fixture(scope="module")
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoints of a short run on two ranks."""
    folder = str(tmp_path_factory.mktemp("run"))
    llama = LlamaConfig(515, 32, 45, 3, 4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2)
    pool.run(fit, 2, (Layout(pp=2), {"llama": llama}, str(NANOSET), folder))
    return folder


def greedy(source: Source, ids: list[int], count: int = 64) -> list[int]:
    return list(stream(Decoder(source.load("cpu"), len(ids) + count).read, ids, sampler(greedy=True), count))


@pytest.mark.parametrize("folder", sorted(DATA.glob("hf_llama_*")), ids=lambda path: path.name)
def test_greedy_is_what_transformers_wrote(folder: Path) -> None:
    ids = np.load(folder / "reference.npz")["greedy"][0].tolist()
    assert greedy(Source.open(str(folder)), ids[:8]) == ids[8:]


def test_greedy_from_a_checkpoint_is_that_of_its_export_in_transformers(run: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(run, str(tmp_path / "out"))
    tokenizer, theirs = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    text = theirs.generate(**tokenizer("And God said", return_tensors="pt"), max_new_tokens=64, min_new_tokens=64, do_sample=False)[
        0
    ].tolist()
    for source in (Source.open(run), Source.open(str(tmp_path / "out"))):
        ids = source.encode("And God said", None)
        assert ids + greedy(source, ids) == text


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_the_cache_gives_the_logits_of_one_pass(heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where no rounding hides a wrong position; whatever is read at first."""
    torch.manual_seed(heads)
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = LlamaConfig(50, heads * 8, 40, 2, heads, num_key_value_heads=kv_heads, rope_scaling=scaling, initializer_range=0.3)
    model = LlamaStage(config, range(2), first=True, last=True).double()
    ids = torch.randint(0, 50, (1, 20))
    whole = model(ids)[0]
    for pieces in ([1] * 20, [7] + [1] * 13, [19, 1], [5, 9, 1, 5]):
        decoder = Decoder(model, 20)
        logits = [decoder.read(piece.tolist()) for piece in ids[0].split(pieces)]
        torch.testing.assert_close(torch.stack(logits), whole[np.cumsum(pieces) - 1], rtol=0, atol=1e-12)
    monkeypatch.setattr(cache, "PIECE_TOKENS", 6)
    torch.testing.assert_close(Decoder(model, 20).read(ids[0].tolist()), whole[-1], rtol=0, atol=1e-12)


@given(st.integers(0, 1000), st.one_of(st.none(), st.integers(1, 40)), st.one_of(st.none(), st.floats(0.01, 1.0)))
def test_likely_tokens_are_those_of_transformers(seed: int, top_k: int | None, top_p: float | None) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 3
    theirs = logits[None]
    if top_k is not None:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p is not None:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    assert torch.equal(keep_likely(logits, top_k, top_p), theirs[0])


def test_tokens_are_drawn_by_their_probability() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -30.0]).log_softmax(-1)
    choose, count = sampler(temperature=0.5, seed=1), 4000
    drawn = np.bincount([choose(logits) for _ in range(count)], minlength=4) / count
    wanted = (logits / 0.5).softmax(-1).numpy()
    assert np.abs(drawn - wanted).max() < 4 * np.sqrt(0.25 / count)
    assert drawn[3] == 0
    again, other = sampler(seed=7), sampler(seed=8)
    numbers = [[pick(logits) for _ in range(50)] for pick in (sampler(seed=7), again, other)]
    assert numbers[0] == numbers[1] != numbers[2]
    assert len({tuple(pick(logits) for _ in range(50)) for pick in (sampler(), sampler())}) == 2
    nucleus = sampler(top_p=0.6, seed=1)
    assert {nucleus(logits) for _ in range(50)} == {2}  # its probability is 0.67


def test_a_text_ends_with_its_last_token() -> None:
    def counts(ids: list[int]) -> Float[torch.Tensor, "V"]:
        return torch.nn.functional.one_hot(torch.tensor(ids[-1] + 1), 10).float()

    def tokens(*ends: int) -> Iterator[int]:
        return stream(counts, [3, 4], sampler(greedy=True), 4, ends)

    assert list(tokens()) == [5, 6, 7, 8]
    assert list(tokens(6, 7)) == [5, 6]


def out_of(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, str]:
    assert main(["generate", *args]) == 0
    shown = capsys.readouterr()
    return shown.out, shown.err


def test_text_from_a_checkpoint(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer is that of the run's data; a text may begin with nothing."""
    source = Source.open(run)
    assert source.tokenizer is not None
    prompt = "In the beginning"
    ids = source.encode(prompt, None)
    text, note = out_of(capsys, run, "--prompt", prompt, "--greedy", "--max_new_tokens", "12")
    wanted = source.tokenizer.backend.decode(ids + greedy(source, ids, 12), skip_special_tokens=False)
    assert text == wanted + "\n"
    assert note.startswith("12 tokens, ")
    assert note.endswith(" tokens/s\n")
    options = ["--prompt", "", "--seed", "3", "--top_k", "20", "--top_p", "0.9", "--temperature", "0.7", "--max_new_tokens", "10"]
    first = out_of(capsys, run, *options)[0]
    assert first.startswith("<|endoftext|>")
    assert first == out_of(capsys, f"{run}/step-4", *options)[0] != out_of(capsys, run, *options, "--seed", "4")[0]


def test_ids_need_no_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    ids = np.load(UNTIED / "reference.npz")["greedy"][0].tolist()
    text, note = out_of(capsys, str(UNTIED), "--prompt_ids", ",".join(map(str, ids[:8])), "--greedy", "true")
    assert text.split() == [str(token) for token in ids]
    assert note.startswith("64 tokens, ")


def test_no_more_than_the_model_is_meant_for(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ",".join(["5"] * 250)
    text, note = out_of(capsys, str(UNTIED), "--prompt_ids", prompt, "--max_new_tokens", "9", "--seed", "1")
    assert len(text.split()) == 256
    assert note.startswith("6 tokens, ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "a"], "tokenizer: null: {folder} names none that is here: give its path, or prompt_ids for a prompt"),
        ([], "prompt: null: give a text to go on with, or prompt_ids"),
        (["--prompt_ids", "1,x"], "prompt_ids: '1,x' must be token ids: 1,2,3"),
        (["--prompt_ids", "1,320"], "prompt: it has the token id 320, but the model's vocab_size is 320: name its own tokenizer"),
        (["--prompt_ids", ",".join("1" * 256)], "prompt: 256 tokens leave no room in the model's max_position_embeddings=256: shorten it"),
        (["--prompt_ids", "1", "--temperature", "0"], "temperature: 0.0 must be greater than 0; for the most likely tokens set greedy"),
        (["--prompt_ids", "1", "--top_k", "0"], "top_k: 0 must be at least 1"),
        (["--prompt_ids", "1", "--top_p", "1.5"], "top_p: 1.5 must be greater than 0 and at most 1"),
        (["--prompt_ids", "1", "--max_new_tokens", "0"], "max_new_tokens: 0 must be at least 1"),
        (["--prompt", "a", "--tokenizer", "nowhere.json"], "tokenizer: nowhere.json does not exist"),
    ],
)
def test_what_cannot_be_generated_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(UNTIED), *args]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message.format(folder=UNTIED)}")


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is no whole sharded checkpoint and holds none")


def test_an_empty_prompt_needs_a_token_to_begin_with(tmp_path: Path) -> None:
    source: Any = Source.open(str(UNTIED), TOKENIZER)
    assert source.encode("", False) == [1]  # the BOS of its config.json
    with pytest.raises(ConfigError, match=r"^prompt: it is empty, and the tokenizer names no token"):
        Source(source.weights, source.tokenizer, [], set()).encode("", False)
