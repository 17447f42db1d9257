"""A Llama and its training loop in one process, in plain tensors, written apart from the package: the reference of the parity tests.

Nothing is shared with the package but the names of the weights.
"""

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def logits(w: Weights, c: dict, ids: Tensor) -> Tensor:
    x = w["embed_tokens.weight"][ids]
    for layer in range(c["num_hidden_layers"]):
        p = f"layers.{layer}."
        x = x + attention(w, p + "self_attn.", c, norm(x, w[p + "input_layernorm.weight"], c))
        h = norm(x, w[p + "post_attention_layernorm.weight"], c)
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    head = w["embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, w["norm.weight"], c) @ head.T


def norm(x: Tensor, weight: Tensor, c: dict) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * weight


def attention(w: Weights, p: str, c: dict, x: Tensor) -> Tensor:
    b, s, d = x.shape
    n, k = c["num_attention_heads"], c["num_key_value_heads"]
    h = d // n
    bias = c["attention_bias"]

    def project(name: str, y: Tensor) -> Tensor:
        return y @ w[p + name + ".weight"].T + (w[p + name + ".bias"] if bias else 0)

    q = rotate(project("q_proj", x).reshape(b, s, n, h), c)
    key = rotate(project("k_proj", x).reshape(b, s, k, h), c)
    value = project("v_proj", x).reshape(b, s, k, h)
    future = torch.ones(s, s).triu(1).bool()
    heads = []
    for head in range(n):
        mine = head // (n // k)
        scores = q[:, :, head] @ key[:, :, mine].transpose(1, 2) / h**0.5
        heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[:, :, mine])
    return project("o_proj", torch.stack(heads, 2).reshape(b, s, d))


def rotate(x: Tensor, c: dict) -> Tensor:
    s, h = x.shape[1], x.shape[3]
    # Angles in float32 whatever the model's dtype, as transformers defines them.
    angle = torch.outer(torch.arange(s).float(), 1 / c["rope_theta"] ** (torch.arange(0, h, 2).float() / h))
    turn = torch.complex(angle.cos().to(x.dtype), angle.sin().to(x.dtype))
    turned = torch.complex(x[..., : h // 2], x[..., h // 2 :]) * turn[None, :, None]
    return torch.cat([turned.real, turned.imag], -1)


def loss_of(w: Weights, c: dict, batch: dict) -> Tensor:
    """Mean over the unmasked tokens of the whole global batch, with z-loss."""
    z = logits(w, c, batch["input_ids"])
    lse = z.exp().sum(-1).log()
    keep = batch["labels"] != -100
    target = z.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    return ((lse - target + c["z_loss"] * lse**2) * keep).sum() / keep.sum()


def train(weights: Weights, c: dict, batches: list[dict], optimizer: str, accumulate: int, lr: float, clip: float) -> dict:
    """One optimizer step for every ``accumulate`` global batches: losses, first gradients (unclipped), norms, last weights."""
    w = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    if optimizer == "sgd":
        step = torch.optim.SGD(w.values(), lr)
    else:
        step = torch.optim.AdamW(w.values(), lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, norms, gradients = [], [], None
    for start in range(0, len(batches), accumulate):
        step.zero_grad()
        for batch in batches[start : start + accumulate]:
            loss = loss_of(w, c, batch)
            losses.append(loss.item())
            (loss / accumulate).backward()
        gradients = gradients or {name: weight.grad.clone() for name, weight in w.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(w.values(), clip).item())
        step.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": {name: weight.detach() for name, weight in w.items()}}
