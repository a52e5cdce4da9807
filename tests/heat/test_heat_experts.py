"""Experts stacked in one tensor: what the meter says was used is what the block used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.heat.oracles import norms
from tierload.heat import HeatMeter
from tierload.heat.experts import chosen_experts, stacked_experts
from tierload.heat.locality import Locality

EXPERTS, WIDTH = 8, 6
HALF_LIVES = (1.0, 1.0)


class Stack(nn.Module):
    """One matrix an expert. It is called with indices and weights, with counts of sorted tokens, or with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.biases = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: torch.Tensor, *choice: torch.Tensor) -> torch.Tensor:
        if len(choice) == 2:
            index, weights = choice
            local = (index >= 0) & (index < EXPERTS)
            index, weights = index.where(local, 0), weights * local
        elif choice[0].dim() == 1:
            index = torch.arange(EXPERTS).repeat_interleave(choice[0])[:, None]
            weights = torch.ones(index.shape)
        else:
            weights, index = choice[0].softmax(-1).topk(2)
        each = torch.einsum("td,tkdo->tko", x, self.matrices[index]) + self.biases[index]
        return (each * weights[..., None]).sum(1)


def used(locality: Locality, at: int = 0) -> list[int]:
    rows = locality.rows(at)
    assert rows is not None
    return rows.nonzero().flatten().tolist()


def stepped(stack: nn.Module, *inputs: torch.Tensor) -> Locality:
    """What a step with one pass sees."""
    locality = Locality(stack, list(stack.parameters()))
    stack(*inputs).square().sum().backward()
    locality.step(HALF_LIVES, norms(stack))
    return locality


INDEX = torch.tensor([[1, 4], [4, 6], [1, 6]])
COUNTS = torch.tensor([0, 2, 0, 0, 1, 0, 0, 0])
LOGITS = F.one_hot(INDEX, EXPERTS).sum(1).float()
TOKENS = torch.ones(3, WIDTH)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("choice", "rows"),
    [
        ((INDEX, torch.ones(3, 2)), [1, 4, 6]),
        ((INDEX.where(INDEX != 4, EXPERTS), torch.ones(3, 2)), [1, 6]),  # as transformers marks other ranks' experts
        ((INDEX.where(INDEX != 4, -1), torch.ones(3, 2)), [1, 6]),
        ((COUNTS,), [1, 4]),
    ],
    ids=["indices", "indices of others", "indices of none", "counts"],
)
def test_what_is_handed_to_the_experts_tells_which(frozen: bool, choice: tuple, rows: list[int]) -> None:
    stack = Stack().requires_grad_(not frozen)
    locality = stepped(stack, TOKENS.clone().requires_grad_(), *choice)
    assert used(locality, 0) == used(locality, 1) == rows


def test_otherwise_the_gradient_tells() -> None:
    assert used(stepped(Stack(), TOKENS, LOGITS)) == [1, 4, 6]
    frozen = Stack().requires_grad_(False)
    assert stepped(frozen, TOKENS.clone().requires_grad_(), LOGITS).rows(0) is None  # not known: as a whole


def test_in_compiled_code_the_gradient_tells() -> None:
    torch.manual_seed(0)
    stack = Stack()
    locality = Locality(stack, list(stack.parameters()))
    compiled = torch.compile(stack, backend="eager")
    for _ in range(2):
        stack.zero_grad()
        compiled(TOKENS, INDEX, torch.ones(3, 2)).sum().backward()
        locality.step(HALF_LIVES, norms(stack))
    assert used(locality) == [1, 4, 6]


def test_several_passes_of_a_step_add_up_and_an_evaluation_does_not() -> None:
    stack = Stack()
    locality = Locality(stack, list(stack.parameters()))
    for row in INDEX[:2]:
        stack(TOKENS[:1], row[None], torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        stack(TOKENS[:1], torch.tensor([[0, 2]]), torch.ones(1, 2))
    locality.step(HALF_LIVES, norms(stack))
    assert used(locality) == [1, 4, 6]


@pytest.mark.parametrize(
    "inputs",
    [
        (TOKENS, F.one_hot(INDEX, EXPERTS).sum(1), LOGITS),  # a mask over all experts
        (TOKENS, INDEX),  # no weights: any whole numbers
        (INDEX, torch.ones(3, 2)),  # no tokens: words and a mask of them
        (torch.ones(3, WIDTH + 1), INDEX, torch.ones(3, 2)),  # tokens that these experts cannot take
        (COUNTS,),
        (),
    ],
)
def test_other_inputs_choose_nothing(inputs: tuple) -> None:
    assert chosen_experts(inputs, torch.zeros(EXPERTS, WIDTH, WIDTH)) is None


def test_layers_of_torch_and_single_matrices_are_no_stacks() -> None:
    place = nn.ParameterDict({"place": nn.Parameter(torch.zeros(1, 4, 3))})
    assert not any(map(stacked_experts, (nn.Conv1d(3, 4, 2), nn.Bilinear(2, 3, 4), nn.Linear(2, 3), place)))
    assert len(stacked_experts(Stack())) == 2


def test_what_the_caller_says_goes_before_what_is_seen() -> None:
    stack = Stack()
    optimizer = torch.optim.AdamW(stack.parameters())
    meter = HeatMeter(stack, optimizer)
    meter.touch("matrices", torch.tensor([3]))
    stack(TOKENS, INDEX, torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert used(meter._locality) == [3]
    assert used(meter._locality, 1) == [1, 4, 6]


def _mixtral(transformers: object) -> nn.Module:
    config = transformers.MixtralConfig(  # type: ignore[attr-defined]
        vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)  # type: ignore[attr-defined]


def _qwen(transformers: object) -> nn.Module:
    config = transformers.Qwen3MoeConfig(  # type: ignore[attr-defined]
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)  # type: ignore[attr-defined]


def _deepseek(transformers: object) -> nn.Module:
    """Its router chooses within groups and with a bias: the largest logits are not the choice."""
    config = transformers.DeepseekV3Config(  # type: ignore[attr-defined]
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=4,
        topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        first_k_dense_replace=0, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)  # type: ignore[attr-defined]


@pytest.mark.parametrize("of", [_mixtral, _qwen, _deepseek], ids=["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_experts_of_transformers_are_seen_as_their_blocks_use_them(of: Callable[[object], nn.Module]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = of(transformers)
    model.model.layers[1].requires_grad_(False)  # no gradient tells of these, nor of the last word's, which has no loss
    for block in (layer.mlp for layer in model.model.layers):
        nn.init.normal_(block.gate.weight)
    real: dict[str, set[int]] = {}

    def note(name: str) -> Callable:
        return lambda _, inputs: real.setdefault(name, set()).update(inputs[1].flatten().tolist())

    stacks = {name: module for name, module in model.named_modules() if stacked_experts(module)}
    assert len(stacks) == 2
    for name, module in stacks.items():
        module.register_forward_pre_hook(note(name))
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    meter = HeatMeter(model, optimizer)
    words = torch.randint(0, 32, (1, 3))
    model(input_ids=words, labels=words).loss.backward()
    optimizer.step()
    for name, chosen in real.items():
        assert len(chosen) < EXPERTS
        for part in ("gate_up_proj", "down_proj"):
            assert used(meter._locality, names.index(f"{name}.{part}")) == sorted(chosen)
