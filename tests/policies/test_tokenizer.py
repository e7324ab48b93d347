from transformers import AutoTokenizer

from offbook.tiny import path

TOKENIZER = AutoTokenizer.from_pretrained(path())


def test_any_text_survives_the_tokenizer():
    for text in [
        '{"order": "4821"}',
        "naïve café\n\t漢字 🙂",
        "a  b",
        " where is #4,821 now? ",
        "'tis \"it\", isn't it?",
    ]:
        assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_a_word_has_the_same_tokens_wherever_it_stands():
    alone = TOKENIZER("status").input_ids
    for text in ["order_status", "the status of", '"status"', "(status, x)"]:
        ids = TOKENIZER(text).input_ids
        assert any(ids[start : start + len(alone)] == alone for start in range(len(ids)))


def test_each_control_and_markup_token_is_one_id():
    for token in [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<tools>",
        "</tools>",
        "<1>",
        "<9>",
    ]:
        assert len(TOKENIZER(token).input_ids) == 1


def test_tool_markup_survives_skipping_special_tokens():
    ids = TOKENIZER("<tool_call>\n{}\n</tool_call><|im_end|>").input_ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"


def test_turns_end_with_im_end_and_rows_are_padded_with_endoftext():
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")
