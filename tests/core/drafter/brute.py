"""A drafter written a second time, as a server runs it: loops, one token at a time, lists of keys
and values.

Reads nothing but a state dict and a config; shares no code with core. `mutate` switches on one
well-known mistake."""

import math

import torch


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = position / theta ** (torch.arange(half, dtype=torch.float64) / half)
    c, s = angle.cos(), angle.sin()
    return torch.cat(
        [x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s], -1
    )


class Brute:
    def __init__(self, state: dict, config, embed: torch.Tensor, mutate: str = "") -> None:
        self.w = {k: v.double() for k, v in state.items() if v.is_floating_point()}
        self.used = (torch.arange(len(state["d2t"])) + state["d2t"]).tolist()
        self.c, self.embed, self.mutate = config, embed.double(), mutate

    def layer(self, token: int, hidden: torch.Tensor, position: int, seen: list, extra: int = 0):
        """One position: returns (output hidden, key, value); `seen` are the (key, value) it "
        "attends to besides its own."""
        c, w, p = self.c, self.w, "midlayer."
        emb = norm(self.embed[token], w[p + "input_layernorm.weight"], c.rms_eps)
        hid = norm(hidden, w[p + "hidden_norm.weight"], c.rms_eps)
        x = torch.cat([hid, emb] if self.mutate == "hidden first" else [emb, hid])
        at = position if self.mutate == "rope without k" else position + extra
        theta = c.rope_parameters["rope_theta"]
        q = rope((w[p + "self_attn.q_proj.weight"] @ x).view(c.num_heads, c.head_dim), at, theta)
        k = rope((w[p + "self_attn.k_proj.weight"] @ x).view(c.num_kv_heads, c.head_dim), at, theta)
        v = (w[p + "self_attn.v_proj.weight"] @ x).view(c.num_kv_heads, c.head_dim)
        pairs = seen if self.mutate == "no own column" and extra else [*seen, (k, v)]
        out = []
        for h in range(c.num_heads):
            g = h // (c.num_heads // c.num_kv_heads)
            scores = torch.stack(
                [(q[h] * key[g]).sum() / math.sqrt(c.head_dim) for key, _ in pairs]
            )
            weights = torch.softmax(scores, 0)
            out.append(sum(a * value[g] for a, (_, value) in zip(weights, pairs, strict=True)))
        r = hid if self.mutate == "normed residual" else hidden
        h1 = r + w[p + "self_attn.o_proj.weight"] @ torch.cat(out)
        y = norm(h1, w[p + "post_attention_layernorm.weight"], c.rms_eps)
        gate = w[p + "mlp.gate_proj.weight"] @ y
        h2 = h1 + w[p + "mlp.down_proj.weight"] @ (
            gate * torch.sigmoid(gate) * (w[p + "mlp.up_proj.weight"] @ y)
        )
        return h2, k, v

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.w["lm_head.weight"] @ norm(hidden, self.w["norm.weight"], self.c.rms_eps)

    def chain(self, ids: list[int], aux: torch.Tensor, s: int, count: int, forced: bool = False):
        """Drafts (target ids) and logits of a chain from position s; tokens are its own unless "
        "`forced`."""
        seen = []
        for t in range(s + 1):
            token = ids[t] if self.mutate == "no token shift" else ids[t + 1]
            fused = self.w["fc.weight"] @ aux[t].double()
            hidden, key, value = self.layer(token, fused, t, list(seen))
            seen.append((key, value))
        drafts, logits = [], []
        for k in range(count):
            logits.append(self.logits(hidden))
            best = int(logits[-1].argmax())
            drafts.append(best if self.mutate == "ids, not offsets" else self.used[best])
            if k + 1 < count:
                token = ids[s + 2 + k] if forced else drafts[-1]
                feed = fused if self.mutate == "not its own hidden" else hidden
                hidden, key, value = self.layer(token, feed, s, list(seen), extra=k + 1)
                seen.append((key, value))
        return drafts, logits
