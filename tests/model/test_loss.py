"""Token losses against torch's cross_entropy and logsumexp, values and gradients, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from lightning_3d.model.loss import chunked_token_losses, token_losses, z_losses


def draw(dtype=torch.float64, masked=0.3):
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(3, 7, 19, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 19, (3, 7), generator=generator)
    labels[torch.rand(3, 7, generator=generator) < masked] = -100
    return logits.to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("masked", [0.0, 0.3, 1.0])
def test_equals_cross_entropy_and_logsumexp(masked):
    logits, labels = draw(masked=masked)
    nll, lse = token_losses(logits, labels)
    torch.testing.assert_close(nll, F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, logits.logsumexp(-1) * (labels != -100), rtol=0, atol=1e-13)


@pytest.mark.parametrize("masked", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("coefficient", [0.0, 1e-2])
def test_gradient_of_loss_plus_z_loss(masked, coefficient):
    logits, labels = draw(masked=masked)
    weight = torch.rand(3, 7, dtype=torch.float64)
    nll, lse = token_losses(logits, labels)
    (ours,) = torch.autograd.grad(((nll + z_losses(lse, coefficient)) * weight).sum(), logits)
    plain = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    penalty = coefficient * logits.logsumexp(-1) ** 2 * (labels != -100)
    (expected,) = torch.autograd.grad(((plain + penalty) * weight).sum(), logits)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-15)
    assert torch.equal(ours[labels == -100], torch.zeros_like(ours[labels == -100]))


def test_gradients_of_both_outputs_pass_gradcheck():
    logits, labels = draw()
    assert torch.autograd.gradcheck(lambda x: token_losses(x, labels), (logits,))


def test_z_loss_sees_the_true_logits():
    logits, labels = draw(masked=0.0)
    _, lse = token_losses(logits + 100, labels)
    torch.testing.assert_close(z_losses(lse, 0.5), 0.5 * (logits.logsumexp(-1) + 100) ** 2)


def test_bfloat16_logits_are_computed_in_float32():
    logits, labels = draw(torch.bfloat16)
    nll, lse = token_losses(logits, labels)
    assert nll.dtype == lse.dtype == torch.float32
    wide = logits.detach().float().requires_grad_()
    expected, _ = token_losses(wide, labels)
    assert torch.equal(nll, expected)
    (ours,), (reference,) = torch.autograd.grad(nll.sum(), logits), torch.autograd.grad(expected.sum(), wide)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, reference.bfloat16())


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[[1e30, -1e30, 0.0]]], requires_grad=True)
    nll, _ = token_losses(logits, torch.tensor([[0]]))
    nll.sum().backward()
    assert nll.item() == 0.0
    assert logits.grad.isfinite().all()


def test_keeps_no_second_tensor_of_the_logits_size():
    logits, labels = draw()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        token_losses(logits, labels)
    large = [tensor for tensor in kept if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


def test_a_label_outside_the_vocabulary_is_an_error():
    logits, labels = draw()
    labels[0, 0] = -1
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_losses(logits, labels)


def draw_head(dtype=torch.float64, vocabulary=19):
    labels = draw()[1]
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(*labels.shape, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, labels


@pytest.mark.parametrize("chunks", [1, 2, 4, 21, 30])  # of 21 tokens; some chunks are empty at last
def test_chunks_equal_the_whole(chunks):
    hidden, weight, labels = draw_head()
    grads = torch.rand(2, *labels.shape, dtype=torch.float64)
    whole = torch.stack(token_losses(F.linear(hidden, weight), labels))
    parts = torch.stack(chunked_token_losses(hidden, weight, labels, chunks))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-14)
    expected = torch.autograd.grad(whole, (hidden, weight), grads)
    for _ in range(2):  # schedules that split the backward run it twice
        ours = torch.autograd.grad(parts, (hidden, weight), grads, retain_graph=True)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)


def test_chunks_of_frozen_heads_and_of_labels_outside():
    hidden, weight, labels = draw_head()
    weight.requires_grad_(False)
    nll, lse = chunked_token_losses(hidden, weight, labels, 4)
    (nll.sum() + lse.sum()).backward()
    assert hidden.grad.abs().sum() > 0
    labels[0, 0] = -1
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_token_losses(hidden, weight, labels, 4)


def test_chunks_under_autocast_multiply_in_bfloat16_and_add_in_float32():
    hidden, weight, labels = draw_head(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole = torch.stack(token_losses(F.linear(hidden, weight), labels))
        parts = torch.stack(chunked_token_losses(hidden, weight, labels, 4))
    assert torch.equal(parts, whole)
    exact = chunked_token_losses(hidden, weight, labels, 4)
    assert not torch.equal(parts, torch.stack(exact))
    grads = torch.rand(2, *labels.shape)
    of_whole, of_parts = (torch.autograd.grad(losses, (hidden, weight), grads) for losses in (whole, parts))
    assert [grad.dtype for grad in of_parts] == [torch.float32] * 2
    torch.testing.assert_close(of_parts, of_whole, rtol=0.02, atol=0.1)


def peak_nbytes(of):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        of()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_chunks_never_hold_all_logits():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((1, 512, 8), (1024, 8)))
    labels = torch.randint(0, 1024, (1, 512), generator=generator)
    all_logits = 512 * 1024 * 4

    def run(chunks):
        losses = token_losses(F.linear(hidden, weight), labels) if chunks == 1 else chunked_token_losses(hidden, weight, labels, chunks)
        torch.autograd.grad(losses[0].sum(), (hidden, weight))

    assert peak_nbytes(lambda: run(1)) > all_logits
    assert peak_nbytes(lambda: run(16)) < all_logits / 4
