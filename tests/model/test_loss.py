"""Token losses against torch's cross_entropy and logsumexp, values and gradients, in float64."""

import pytest
import torch
import torch.nn.functional as F

from lightning_3d.model.loss import token_losses, z_losses


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
