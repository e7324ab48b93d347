import torch
from torch import nn
from transformers import AutoTokenizer

from policies.evaluate import load
from policies.train import grow, save


def test_a_grown_policy_has_a_token_for_each_of_sixteen_numbers_and_keeps_its_other_rows(tmp_path):
    model, tokenizer = load()
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    before = embeddings.weight.detach().clone()
    tokenizer.chat_template = "{{ messages }}"
    grow(model, tokenizer, seed=0)
    grown = model.get_input_embeddings()
    assert isinstance(grown, nn.Embedding)
    after = grown.weight.detach()
    assert len(after) == len(tokenizer) == 1545
    torch.testing.assert_close(after[: len(before)], before)
    known, added = after[tokenizer.convert_tokens_to_ids(["<1>", "<9>"])], after[len(before) :]
    assert {"<16>", "<think>", "</think>"} <= set(tokenizer.get_vocab())
    assert 0.3 < float(added.norm(dim=1).mean() / known.norm(dim=1).mean()) < 3
    grow(model, tokenizer, seed=0)
    assert len(tokenizer) == 1545
    save(model, tokenizer, tmp_path / "grown")
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "grown")
    assert [len(reloaded(f"<{number}>").input_ids) for number in range(1, 17)] == [1] * 16
    alone = reloaded("sorts").input_ids
    assert reloaded("'sorts'").input_ids[1:-1] == alone
    assert reloaded.decode(reloaded("it's 'sorts', isn't it?").input_ids) == "it's 'sorts', isn't it?"
