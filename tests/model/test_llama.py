"""The Llama against transformers' (logits, gradients), its stages against the whole, and the contract that sharding relies on."""

import copy
import pickle
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.hf import read_hf_config, read_hf_weights, to_hf_name
from lightning_3d.model.llama import LlamaStage
from lightning_3d.model.loss import token_losses

DATA = Path(__file__).parents[1] / "data"
TINY = LlamaConfig(33, 24, 40, 4, 4, num_key_value_heads=2, initializer_range=0.2)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS = [None, {"rope_type": "linear", "factor": 3.0}, LLAMA3]


def whole(config):
    return LlamaStage(config, range(config.num_hidden_layers), first=True, last=True)


def their_model(config, ours):
    """Transformers' Llama of the same shape with the same weights."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    shape = {key: value for key, value in asdict(config).items() if key != "attn_implementation"}
    theirs = LlamaForCausalLM(TheirConfig(**shape))
    theirs.to(next(ours.parameters()).dtype)
    state = {to_hf_name(name): tensor for name, tensor in ours.state_dict().items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state)
    return theirs


@st.composite
def shapes(draw):
    kv_heads, groups, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([None, 4, 10]))
    heads = kv_heads * groups
    return {
        "vocab_size": draw(st.integers(5, 70)),
        "hidden_size": heads * 2 * draw(st.integers(2, 5)),
        "intermediate_size": draw(st.integers(3, 50)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([kv_heads, None])),
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "rope_theta": draw(st.sampled_from([1e4, 5e5])),
        "rope_scaling": draw(st.sampled_from(SCALINGS)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "initializer_range": draw(st.sampled_from([0.02, 0.2])),
    }


def randomise_norms_and_biases(model):
    """Norms at one and biases at zero would hide a forgotten factor."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter.data, 0.5, 1.5)


@pytest.mark.parametrize("folder", sorted(DATA.glob("hf_llama_*")), ids=lambda path: path.name)
def test_logits_equal_those_transformers_wrote(folder):
    reference = np.load(folder / "reference.npz")
    model = whole(read_hf_config(folder))
    model.load_state_dict(dict(read_hf_weights(folder, model.state_dict())))
    with torch.no_grad():
        logits = model(torch.from_numpy(reference["input_ids"]))
        prompt = torch.from_numpy(reference["greedy"])
        greedy = model(prompt)[0, 7:-1].argmax(-1)
    np.testing.assert_allclose(logits.numpy(), reference["logits"], rtol=1e-5, atol=1e-5)
    assert torch.equal(greedy, prompt[0, 8:])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(shape=shapes(), seed=st.integers(0, 99), length=st.integers(1, 40))
def test_logits_equal_transformers_for_drawn_shapes(shape, seed, length):
    config = LlamaConfig(**shape)
    torch.manual_seed(seed)
    ours = whole(config)
    randomise_norms_and_biases(ours)
    ids = torch.randint(0, config.vocab_size, (2, length))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), their_model(config, ours)(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "linear", "llama3"])
def test_gradients_equal_transformers_in_float64(tied, scaling):
    torch.manual_seed(1)
    config = replace(TINY, tie_word_embeddings=tied, rope_scaling=scaling, attention_bias=True, mlp_bias=True)
    ours = whole(config).double()
    randomise_norms_and_biases(ours)
    theirs = their_model(config, ours)
    for name, module in list(theirs.named_modules()):
        if name.endswith("norm"):  # theirs casts to float32 inside, also in a float64 model
            exact = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=torch.float64)
            exact.weight = module.weight
            theirs.set_submodule(name, exact)
    ids, labels = torch.randint(0, 33, (2, 20)), torch.randint(0, 33, (2, 20))
    token_losses(ours(ids), labels)[0].sum().backward()
    nn.functional.cross_entropy(theirs(ids).logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[to_hf_name(name)].grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 2, 3), (0, 4), (2, 2)])
def test_stages_cut_anywhere_compose_to_the_whole(tied, cuts):
    torch.manual_seed(2)
    config = replace(TINY, tie_word_embeddings=tied)
    model, ids = whole(config), torch.randint(0, 33, (2, 9))
    edges = [0, *cuts, 4]
    x, names = ids, set()
    for number, (start, end) in enumerate(pairwise(edges)):
        stage = LlamaStage(config, range(start, end), first=number == 0, last=number == len(cuts))
        stage.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in stage.state_dict()})
        names |= stage.state_dict().keys()
        x = stage(x)
    assert torch.equal(x, model(ids))
    assert names == model.state_dict().keys()


@pytest.mark.parametrize("tied", [False, True])
def test_a_last_stage_holds_the_head_under_its_global_name(tied):
    stage = LlamaStage(replace(TINY, tie_word_embeddings=tied), range(2, 4), first=False, last=True)
    tops = {name.split(".")[0] for name in stage.state_dict()}
    assert tops == {"layers", "norm", "embed_tokens" if tied else "lm_head"}
    assert set(stage.layers) == {"2", "3"}
    middle = LlamaStage(replace(TINY, tie_word_embeddings=tied), range(1, 2), first=False, last=False)
    assert all(name.startswith("layers.1.") for name in middle.state_dict())


def test_heads_and_sequence_length_are_read_off_the_projections():
    """Half the heads' weights in an attention built for all: it must compute those heads, as a tensor-parallel rank does."""
    torch.manual_seed(3)
    attention, half = whole(TINY).layers["0"].self_attn, whole(TINY).layers["1"].self_attn
    parts = []
    for coord in range(2):
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).weight.chunk(2)[coord]
            getattr(half, name).weight = nn.Parameter(rows)
        half.o_proj.weight = nn.Parameter(attention.o_proj.weight.chunk(2, dim=1)[coord])
        parts.append(half(torch.ones(1, 5, 24).cumsum(1)))
    torch.testing.assert_close(parts[0] + parts[1], attention(torch.ones(1, 5, 24).cumsum(1)), rtol=1e-5, atol=1e-5)


def test_positions_count_from_zero_and_only_their_differences_matter():
    torch.manual_seed(4)
    model, ids = whole(TINY).double(), torch.randint(0, 33, (2, 11))
    positions = torch.arange(11).expand(2, -1)
    assert torch.equal(model(ids), model(ids, positions))
    torch.testing.assert_close(model(ids), model(ids, positions + 5), rtol=0, atol=1e-5)
    assert not torch.allclose(model(ids), model(ids, positions + 11 * (positions > 5)), atol=1e-3)


def packed(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])


def losses_and_gradients(model, parts):
    """Logits of each (ids, positions), and gradients of the mean square of all of them."""
    model.zero_grad()
    logits = [model(ids, positions) for ids, positions in parts]
    torch.cat([each.flatten() for each in logits]).square().mean().backward()
    return logits, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention_bias", [False, True])
def test_packed_documents_are_as_good_as_alone(attention_bias):
    """Two rows of two and three documents, one of which began before its row, against five forwards of one document."""
    torch.manual_seed(9)
    model = whole(replace(TINY, attention_bias=attention_bias)).double()
    randomise_norms_and_biases(model)
    ids = torch.randint(0, 33, (2, 12))
    positions = torch.stack([packed(5, 7), torch.cat([torch.arange(3) + 40, packed(1, 8)])])
    alone = [(0, 0, 5), (0, 5, 12), (1, 0, 3), (1, 3, 4), (1, 4, 12)]
    parts = [(ids[row : row + 1, begin:end], positions[row : row + 1, begin:end]) for row, begin, end in alone]
    parts = [(each, None if place[0, 0] == 0 else place) for each, place in parts]
    (together,), gradients = losses_and_gradients(model, [(ids, positions)])
    apart, expected = losses_and_gradients(model, parts)
    for (row, begin, end), logits in zip(alone, apart, strict=True):
        torch.testing.assert_close(together[row, begin:end], logits[0], rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)
    assert not torch.allclose(model(ids), together, atol=1e-2)


def test_every_stage_attends_within_documents():
    torch.manual_seed(10)
    model, ids, positions = whole(TINY), torch.randint(0, 33, (1, 9)), packed(4, 5)[None]
    first, last = LlamaStage(TINY, range(2), first=True, last=False), LlamaStage(TINY, range(2, 4), first=False, last=True)
    for stage in (first, last):
        stage.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in stage.state_dict()})
    assert torch.equal(last(first(ids, positions), positions), model(ids, positions))
    assert not torch.equal(last(first(ids, positions)), model(ids, positions))


def test_there_are_no_buffers_and_every_owner_of_parameters_can_draw_them_anew():
    with torch.device("meta"):
        model = whole(replace(TINY, attention_bias=True))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.reset_parameters()
        drawn = {name: tensor.clone() for name, tensor in model.state_dict().items()} if seed == 5 else drawn
    assert not torch.equal(drawn["lm_head.weight"], model.lm_head.weight)
    for name, tensor in drawn.items():
        if name.endswith("bias"):
            assert not tensor.any()
        elif name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones(24))
        else:
            assert tensor.std().item() == pytest.approx(0.2, rel=0.15)
            assert abs(tensor.mean().item()) < 0.03


def test_validation_in_inference_mode_may_come_before_training():
    torch.manual_seed(7)
    model, ids = whole(TINY), torch.randint(0, 33, (1, 8))
    with torch.inference_mode():
        first = model(ids)
    logits = model(ids)
    logits.sum().backward()
    assert torch.equal(first, logits.detach())


def test_a_used_stage_can_be_copied_and_pickled():
    model, ids = whole(TINY), torch.randint(0, 33, (1, 8))
    logits = model(ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids), logits)
        assert twin.layers["0"].self_attn.rope is twin.layers["3"].self_attn.rope


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_runs_in_other_dtypes(dtype):
    torch.manual_seed(8)
    model, ids = whole(TINY), torch.randint(0, 33, (1, 8))
    expected = model(ids)
    logits = model.to(dtype)(ids)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=1e-5 if dtype == torch.float64 else 0.2)
