"""Weight-decay groups: exactly the parameters that a pattern spells, logged, and the same on every stage."""

import logging

import pytest
import torch

from lightning_3d.errors import ConfigError
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.llama import LlamaStage
from lightning_3d.optim.groups import decay_groups, excluded_names

CONFIG = LlamaConfig(33, 24, 40, 2, 4, attention_bias=True)


def stage(layers=range(2), *, first=True, last=True):
    return LlamaStage(CONFIG, layers, first=first, last=last)


def split(model, *args, **kwargs):
    """{weight_decay: names} of the groups."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {group["weight_decay"]: [names[p] for p in group["params"]] for group in decay_groups(model.named_parameters(), *args, **kwargs)}


def test_without_patterns_everything_decays():
    model = stage()
    assert split(model, 0.1) == {0.1: [name for name, _ in model.named_parameters()]}


def test_patterns_exclude_what_they_match_as_a_whole():
    model = stage()
    groups = split(model, 0.1, [r".*norm\.weight", r".*\.bias", "embed_tokens.weight"])
    excluded = {name for name, p in model.named_parameters() if p.dim() == 1 or name == "embed_tokens.weight"}
    assert set(groups[0.0]) == excluded
    assert set(groups[0.1]) == {name for name, _ in model.named_parameters()} - excluded


@pytest.mark.parametrize("pattern", ["norm", r"layers\.0", "embed_tokens", r"weight", "^norm.weigh"])
def test_a_pattern_that_matches_no_whole_name_is_refused_with_a_hint(pattern):
    with pytest.raises(ConfigError, match="matches the whole name of no parameter") as error:
        split(stage(), 0.1, [pattern])
    assert f"'.*{pattern}.*' would match" in str(error.value)


def test_an_invalid_pattern_is_refused():
    with pytest.raises(ConfigError, match="is not a regular expression"):
        split(stage(), 0.1, ["*norm"])


def test_what_matched_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        assert excluded_names(["a.norm", "b.norm", "c"], [".*norm", "c"]) == {"a.norm", "b.norm", "c"}
    assert "'.*norm': 2 parameters: a.norm, b.norm" in caplog.text
    assert "'c': 1 parameters: c" in caplog.text


def test_stages_check_patterns_against_the_whole_model_and_add_up_to_it():
    patterns, every = [r".*norm\.weight", "embed_tokens.weight"], [name for name, _ in stage().named_parameters()]
    whole = split(stage(), 0.1, patterns)
    parts = [split(stage(range(1), last=False), 0.1, patterns, every), split(stage(range(1, 2), first=False), 0.1, patterns, every)]
    for decay in (0.0, 0.1):
        assert [name for part in parts for name in part[decay]] == whole[decay]
    with pytest.raises(ConfigError, match="embed_tokens"):
        split(stage(range(1, 2), first=False), 0.1, patterns)


def test_an_empty_group_is_left_out_and_frozen_parameters_too():
    model = stage(range(1, 2), first=False)
    every = [name for name, _ in stage().named_parameters()]
    assert list(split(model, 0.1, ["embed_tokens.weight"], every)) == [0.1]
    assert list(split(model, 0.1, [".*"])) == [0.0]
    model.norm.weight.requires_grad_(False)
    assert "norm.weight" not in split(model, 0.1)[0.1]


def test_torch_can_save_and_load_the_flattened_state_of_a_stage_without_excluded_parameters():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

    model, options = stage(range(1, 2), first=False), StateDictOptions(flatten_optimizer_state_dict=True)
    every = [name for name, _ in stage().named_parameters()]
    optimizer = torch.optim.AdamW(decay_groups(model.named_parameters(), 0.1, ["embed_tokens.weight"], every), lr=1.0)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    assert state["param_groups.norm.weight.weight_decay"] == 0.1
