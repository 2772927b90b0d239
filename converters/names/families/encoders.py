"""Tables of encoders and encoder-decoders: the output of `save_pretrained` in transformers 5.23."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from converters.names.families.config import Config, architectures
from converters.names.families.encoder import CLASSIFIER, LAYERS, POOLED, TIED, Encoder, Head, Stack
from converters.names.families.media import MEDIA
from converters.names.families.rows import Saved

# -- BERT and its kind -----------------------------------------------------------------------------------------

_BERT_SIZES: Mapping[str, tuple[str, int | None]] = {
    "h": ("hidden_size", 768),
    "f": ("intermediate_size", 3072),
    "v": ("vocab_size", 30522),
    "p": ("max_position_embeddings", 512),
    "t": ("type_vocab_size", 2),
}
_BERT_LAYER = """
    attention.self.[query|key|value].weight h h
    attention.self.[query|key|value].bias h
    attention.output.dense.weight h h
    attention.output.dense.bias h
    [attention.output|output].LayerNorm.[weight|bias] h
    intermediate.dense.weight f h
    intermediate.dense.bias f
    output.dense.weight h f
    output.dense.bias h
"""
_BERT_TOP = """
    embeddings.word_embeddings.weight v h
    embeddings.position_embeddings.weight p h
    embeddings.token_type_embeddings.weight t h
    embeddings.LayerNorm.[weight|bias] h
    pooler.dense.weight h h ? pooled
    pooler.dense.bias h ? pooled
"""
_PREDICTIONS = """
    cls.predictions.bias v
    cls.predictions.transform.dense.weight h h
    cls.predictions.transform.dense.bias h
    cls.predictions.transform.LayerNorm.[weight|bias] h
    cls.predictions.decoder.weight v h ? !tie_word_embeddings
    cls.predictions.decoder.bias v ? !tie_word_embeddings
"""
_PREDICTIONSTIED = """
    cls.predictions.decoder.weight v h
    cls.predictions.decoder.bias v
"""
_NEXT_SENTENCE = "cls.seq_relationship.weight 2 h \n cls.seq_relationship.bias 2 \n"
_CHOICE = "classifier.weight 1 h \n classifier.bias 1 \n"
_ANSWERS = "qa_outputs.weight labels h \n qa_outputs.bias labels \n"
_DENSE_CLASSIFIER = """
    classifier.dense.weight h h
    classifier.dense.bias h
    classifier.out_proj.weight labels h
    classifier.out_proj.bias labels
"""
_BERT_LM = Head(_PREDICTIONS, _PREDICTIONSTIED)


def _plain_positions(config: Config) -> bool:
    """Return False for cross attention, or relative positions (transformers 4)."""
    return not config.flag("add_cross_attention") and config.get("position_embedding_type") in (None, "absolute")


_BERT = Encoder(
    "Bert",
    "bert",
    _BERT_TOP,
    (Stack("encoder.layer", LAYERS, 12, _BERT_LAYER),),
    {
        "Model": Head(prefix="", kinds=POOLED),
        "ForMaskedLM": _BERT_LM,
        "LMHeadModel": _BERT_LM,
        "ForPreTraining": replace(_BERT_LM, rows=_PREDICTIONS + _NEXT_SENTENCE, kinds=POOLED),
        "ForNextSentencePrediction": Head(_NEXT_SENTENCE, kinds=POOLED),
        "ForSequenceClassification": Head(CLASSIFIER, kinds=POOLED),
        "ForMultipleChoice": Head(_CHOICE, kinds=POOLED),
        "ForTokenClassification": Head(CLASSIFIER),
        "ForQuestionAnswering": Head(_ANSWERS),
    },
    _BERT_SIZES,
    covers=_plain_positions,
)
_ROBERTA_LM = Head(
    """
    lm_head.bias v
    lm_head.dense.weight h h
    lm_head.dense.bias h
    lm_head.layer_norm.[weight|bias] h
    lm_head.decoder.weight v h ? !tie_word_embeddings
    lm_head.decoder.bias v ? !tie_word_embeddings
    """,
    "lm_head.decoder.weight v h \n lm_head.decoder.bias v",
)
_ROBERTA = replace(
    _BERT,
    stem="Roberta",
    base="roberta",
    heads={
        "Model": Head(prefix="", kinds=POOLED),
        "ForMaskedLM": _ROBERTA_LM,
        "ForCausalLM": _ROBERTA_LM,
        "ForSequenceClassification": Head(_DENSE_CLASSIFIER),
        "ForMultipleChoice": Head(_CHOICE, kinds=POOLED),
        "ForTokenClassification": Head(CLASSIFIER),
        "ForQuestionAnswering": Head(_ANSWERS),
    },
    sizes={**_BERT_SIZES, "v": ("vocab_size", 50265)},
)
_ELECTRA_LM = Head(
    """
    generator_predictions.LayerNorm.[weight|bias] e
    generator_predictions.dense.weight e h
    generator_predictions.dense.bias e
    generator_lm_head.bias v
    generator_lm_head.weight v e ? !tie_word_embeddings
    """,
    "generator_lm_head.weight v e",
)


def _electra_kinds(config: Config) -> Collection[str]:
    width, hidden = config.size("embedding_size", default=128), config.size("hidden_size", default=256)
    return () if width == hidden else ("projected",)


_ELECTRA = Encoder(
    "Electra",
    "electra",
    """
    embeddings.word_embeddings.weight v e
    embeddings.position_embeddings.weight p e
    embeddings.token_type_embeddings.weight t e
    embeddings.LayerNorm.[weight|bias] e
    embeddings_project.weight h e ? projected
    embeddings_project.bias h ? projected
    """,
    _BERT.stacks,
    {
        "Model": Head(prefix=""),
        "ForMaskedLM": _ELECTRA_LM,
        "ForCausalLM": _ELECTRA_LM,
        "ForPreTraining": Head(
            """
            discriminator_predictions.dense.weight h h
            discriminator_predictions.dense.bias h
            discriminator_predictions.dense_prediction.weight 1 h
            discriminator_predictions.dense_prediction.bias 1
            """
        ),
        "ForSequenceClassification": Head(_DENSE_CLASSIFIER),
        "ForTokenClassification": Head(CLASSIFIER),
        "ForQuestionAnswering": Head(_ANSWERS),
    },
    {**_BERT_SIZES, "h": ("hidden_size", 256), "f": ("intermediate_size", 1024), "e": ("embedding_size", 128)},
    kinds=_electra_kinds,
    covers=_plain_positions,
)
_PRE_CLASSIFIER = "pre_classifier.weight h h \n pre_classifier.bias h \n"
_DISTILBERT = Encoder(
    "DistilBert",
    "distilbert",
    """
    embeddings.word_embeddings.weight v h
    embeddings.position_embeddings.weight p h
    embeddings.LayerNorm.[weight|bias] h
    """,
    (
        Stack(
            "transformer.layer",
            ("n_layers", "num_hidden_layers"),
            6,
            """
            attention.[q|k|v|out]_lin.weight h h
            attention.[q|k|v|out]_lin.bias h
            ffn.lin1.weight f h
            ffn.lin1.bias f
            ffn.lin2.weight h f
            ffn.lin2.bias h
            [sa|output]_layer_norm.[weight|bias] h
            """,
        ),
    ),
    {
        "Model": Head(prefix=""),
        "ForMaskedLM": Head(
            """
            vocab_layer_norm.[weight|bias] h
            vocab_transform.weight h h
            vocab_transform.bias h
            vocab_projector.bias v
            vocab_projector.weight v h ? !tie_word_embeddings
            """,
            "vocab_projector.weight v h",
        ),
        "ForSequenceClassification": Head(_PRE_CLASSIFIER + CLASSIFIER),
        "ForMultipleChoice": Head(_PRE_CLASSIFIER + _CHOICE),
        "ForTokenClassification": Head(CLASSIFIER),
        "ForQuestionAnswering": Head(_ANSWERS),
    },
    {
        "h": ("dim", 768),
        "f": ("hidden_dim", 3072),
        "v": ("vocab_size", 30522),
        "p": ("max_position_embeddings", 512),
    },
)
_MODERN_HEAD = """
    head.dense.weight h h
    head.dense.bias h ? classifier_bias
    head.norm.weight h
    head.norm.bias h ? norm_bias
"""
_MODERN_CLASSIFIER = Head(_MODERN_HEAD + CLASSIFIER)
_MODERNBERT = Encoder(
    "ModernBert",
    "model",
    """
    embeddings.tok_embeddings.weight v h
    [embeddings.norm|final_norm].weight h
    [embeddings.norm|final_norm].bias h ? norm_bias
    """,
    (
        Stack(
            "layers",
            LAYERS,
            22,
            """
            attn_norm.weight h ? later_layer
            attn_norm.bias h ? later_layer norm_bias
            mlp_norm.weight h
            mlp_norm.bias h ? norm_bias
            attn.Wqkv.weight 3h h
            attn.Wqkv.bias 3h ? attention_bias
            attn.Wo.weight h h
            attn.Wo.bias h ? attention_bias
            mlp.Wi.weight 2f h
            mlp.Wi.bias 2f ? mlp_bias
            mlp.Wo.weight h f
            mlp.Wo.bias h ? mlp_bias
            """,
        ),
    ),
    {
        "Model": Head(prefix=""),
        "ForMaskedLM": Head(
            _MODERN_HEAD + "decoder.bias v ? decoder_bias \n decoder.weight v h ? !tie_word_embeddings",
            "decoder.weight v h",
        ),
        **dict.fromkeys(
            ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"), _MODERN_CLASSIFIER
        ),
        "ForMultipleChoice": Head(_MODERN_HEAD + _CHOICE),
    },
    {"h": ("hidden_size", 768), "f": ("intermediate_size", 1152), "v": ("vocab_size", 50368)},
    flags={TIED: True, "decoder_bias": True},
)
_CONTEXT_POOLER = "pooler.dense.weight c c \n pooler.dense.bias c \n"


def _deberta_dims(config: Config, dims: Mapping[str, int]) -> dict[str, int]:
    positions = config.get("max_relative_positions")
    span = positions if isinstance(positions, int) and positions > 0 else dims["p"]
    buckets = config.get("position_buckets")
    span = buckets if isinstance(buckets, int) and buckets > 0 else span
    return {
        "r": 2 * span,
        "t": config.natural("type_vocab_size"),
        "c": config.size("pooler_hidden_size", default=dims["h"]),
    }


def _is_plain_deberta(config: Config) -> bool:
    has_positions = config.flag("relative_attention") and not config.flag("share_att_key")
    width = config.get("embedding_size")
    return (
        not has_positions
        and not config.natural("conv_kernel_size")
        and width in (None, config.get("hidden_size"))
        and config.flag("legacy", True)
    )


_DEBERTA = Encoder(
    "DebertaV2",
    "deberta",
    """
    embeddings.word_embeddings.weight v h
    embeddings.position_embeddings.weight p h ? position_biased_input
    embeddings.token_type_embeddings.weight t h ? type_vocab_size
    embeddings.LayerNorm.[weight|bias] h
    encoder.rel_embeddings.weight r h ? relative_attention
    encoder.LayerNorm.[weight|bias] h ? relative_attention norm_rel_ebd_layer_norm
    """,
    (
        Stack(
            "encoder.layer",
            LAYERS,
            24,
            _BERT_LAYER.replace("[query|key|value]", "[query|key|value]_proj"),
        ),
    ),
    {
        "Model": Head(prefix=""),
        "ForMaskedLM": _BERT_LM,
        "ForSequenceClassification": Head(_CONTEXT_POOLER + CLASSIFIER),
        "ForMultipleChoice": Head(_CONTEXT_POOLER + _CHOICE),
        "ForTokenClassification": Head(CLASSIFIER),
        "ForQuestionAnswering": Head(_ANSWERS),
    },
    {
        "h": ("hidden_size", 1536),
        "f": ("intermediate_size", 6144),
        "v": ("vocab_size", 128100),
        "p": ("max_position_embeddings", 512),
    },
    dims=_deberta_dims,
    kinds=lambda config: ("norm_rel_ebd_layer_norm",) if "layer_norm" in str(config.get("norm_rel_ebd")) else (),
    flags={TIED: True, "position_biased_input": True},
    covers=_is_plain_deberta,
    ignored=(r"(.*\.)?embeddings\.position_ids", r"mask_predictions\..*"),
)

# -- encoder-decoders ------------------------------------------------------------------------------------------

_T5_ATTENTION = """
    layer.{n}.{name}.[q|k|v].weight a h
    layer.{n}.{name}.o.weight h a
    layer.{n}.layer_norm.weight h
"""
_T5_SELF = _T5_ATTENTION.replace("{n}", "0").replace("{name}", "SelfAttention") + (
    "layer.0.SelfAttention.relative_attention_bias.weight b heads ? first_layer \n"
)
_T5_MLP = """
    layer.{n}.DenseReluDense.wi.weight f h ? !gated
    layer.{n}.DenseReluDense.wi_[0|1].weight f h ? gated
    layer.{n}.DenseReluDense.wo.weight h f
    layer.{n}.layer_norm.weight h
"""
_T5_CROSS = _T5_ATTENTION.replace("{n}", "1").replace("{name}", "EncDecAttention")
_SEQ2SEQ = ("with_decoder",)
_T5_EMBEDDINGS = "[encoder|decoder].embed_tokens.weight v h \n"
_T5_HEAD = """
    classification_head.dense.weight h h
    classification_head.dense.bias h
    classification_head.out_proj.weight labels h
    classification_head.out_proj.bias labels
"""
_T5 = Encoder(
    "T5",
    "transformer",
    "shared.weight v h \n encoder.final_layer_norm.weight h \n decoder.final_layer_norm.weight h ? with_decoder",
    (
        Stack("encoder.block", ("num_layers",), 6, _T5_SELF + _T5_MLP.replace("{n}", "1")),
        Stack(
            "decoder.block",
            ("num_decoder_layers", "num_layers"),
            6,
            _T5_SELF + _T5_CROSS + _T5_MLP.replace("{n}", "2"),
            needs="with_decoder",
        ),
    ),
    {
        "Model": Head(optional=_T5_EMBEDDINGS, prefix="", kinds=_SEQ2SEQ),
        "EncoderModel": Head(optional="encoder.embed_tokens.weight v h", prefix=""),
        "ForConditionalGeneration": Head(
            "lm_head.weight v h ? !tie_word_embeddings",
            _T5_EMBEDDINGS + "lm_head.weight v h",
            prefix="",
            kinds=_SEQ2SEQ,
        ),
        "ForQuestionAnswering": Head(_ANSWERS, _T5_EMBEDDINGS, prefix="", kinds=_SEQ2SEQ),
        "ForSequenceClassification": Head(_T5_HEAD, _T5_EMBEDDINGS.replace("[", "transformer.["), kinds=_SEQ2SEQ),
        "ForTokenClassification": Head(CLASSIFIER, "transformer.encoder.embed_tokens.weight v h"),
    },
    {
        "h": ("d_model", 512),
        "f": ("d_ff", 2048),
        "v": ("vocab_size", 32128),
        "d": ("d_kv", 64),
        "heads": ("num_heads", 8),
        "b": ("relative_attention_num_buckets", 32),
    },
    dims=lambda config, dims: {"a": dims["heads"] * dims["d"]},
    kinds=lambda config: ("gated",) if str(config.get("feed_forward_proj")).startswith("gated") else (),
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
_MT5 = replace(
    _T5,
    stem="MT5",
    stacks=tuple(replace(one, default=8) for one in _T5.stacks),
    flags={TIED: True, "feed_forward_proj": "gated-gelu"},
    sizes={**_T5.sizes, "f": ("d_ff", 1024), "v": ("vocab_size", 250112), "heads": ("num_heads", 6)},
)


def _bart_attention(name: str, key_bias: bool = True) -> str:
    biased = "[q|k|v|out]" if key_bias else "[q|v|out]"
    return f"""
    {name}.[q|k|v|out]_proj.weight h h
    {name}.{biased}_proj.bias h
    {name}_layer_norm.[weight|bias] h
    """


def _bart_mlp(size: str) -> str:
    return f"""
    fc1.weight {size} h
    fc1.bias {size}
    fc2.weight h {size}
    fc2.bias h
    final_layer_norm.[weight|bias] h
    """


def _bart_stacks(num_layers: int, key_bias: bool = True) -> tuple[Stack, Stack]:
    attention, cross = (_bart_attention(name, key_bias) for name in ("self_attn", "encoder_attn"))
    return (
        Stack("encoder.layers", ("encoder_layers",), num_layers, attention + _bart_mlp("f")),
        Stack("decoder.layers", ("decoder_layers",), num_layers, attention + cross + _bart_mlp("g")),
    )


_BART_SIZES: Mapping[str, tuple[str, int | None]] = {
    "h": ("d_model", 1024),
    "f": ("encoder_ffn_dim", 4096),
    "g": ("decoder_ffn_dim", 4096),
    "v": ("vocab_size", 50265),
    "p": ("max_position_embeddings", 1024),
}
_EMBEDDED = "model.[encoder|decoder].embed_tokens.weight v h \n"
_OUTPUT = "lm_head.weight v h ? !tie_word_embeddings \n"
_BART = Encoder(
    "Bart",
    "model",
    """
    shared.weight v h
    [encoder|decoder].embed_tokens.weight v h ? !tie_word_embeddings
    [encoder|decoder].embed_positions.weight q h
    [encoder|decoder].layernorm_embedding.[weight|bias] h
    """,
    _bart_stacks(12),
    {
        "Model": Head(optional=_EMBEDDED.replace("model.", ""), prefix=""),
        "ForConditionalGeneration": Head("final_logits_bias 1 v \n" + _OUTPUT, _EMBEDDED + "lm_head.weight v h"),
        "ForSequenceClassification": Head(_T5_HEAD, _EMBEDDED),
        "ForQuestionAnswering": Head(_ANSWERS.replace("labels", "2"), _EMBEDDED),
    },
    _BART_SIZES,
    dims=lambda config, dims: {"q": dims["p"] + 2},
    labels=3,
    ignored=(r"(.*\.)?(encoder|decoder)\.version",),
)
_MARIAN = Encoder(
    "Marian",
    "model",
    """
    shared.weight v h
    [encoder|decoder].embed_tokens.weight v h ? !tie_word_embeddings
    [encoder|decoder].embed_positions.weight p h ? with_positions
    """,
    _bart_stacks(12),
    {
        "Model": Head(optional=_EMBEDDED.replace("model.", ""), prefix="", kinds=("with_positions",)),
        "MTModel": Head(
            "final_logits_bias 1 v \n" + _OUTPUT,
            _EMBEDDED + "model.[encoder|decoder].embed_positions.weight p h \n lm_head.weight v h",
        ),
    },
    {**_BART_SIZES, "v": ("vocab_size", 58101)},
    covers=lambda config: (
        config.flag("share_encoder_decoder_embeddings", True)
        and config.get("decoder_vocab_size") in (None, config.get("vocab_size"))
    ),
)
_WHISPER = Encoder(
    "Whisper",
    "model",
    """
    encoder.conv1.weight h m 3
    encoder.conv2.weight h h 3
    encoder.conv[1|2].bias h
    encoder.embed_positions.weight s h
    decoder.embed_positions.weight p h
    decoder.embed_tokens.weight v h
    [encoder|decoder].layer_norm.[weight|bias] h
    """,
    _bart_stacks(4, key_bias=False),
    {
        "Model": Head(prefix=""),
        "ForConditionalGeneration": Head("proj_out.weight v h ? !tie_word_embeddings", "proj_out.weight v h"),
    },
    {
        "h": ("d_model", 384),
        "f": ("encoder_ffn_dim", 1536),
        "g": ("decoder_ffn_dim", 1536),
        "v": ("vocab_size", 51865),
        "m": ("num_mel_bins", 80),
        "s": ("max_source_positions", 1500),
        "p": ("max_target_positions", 448),
    },
)

ENCODERS: Mapping[str, Encoder] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": replace(_ROBERTA, stem="XLMRoberta", sizes=_BERT_SIZES),
    "camembert": replace(_ROBERTA, stem="Camembert", sizes=_BERT_SIZES),
    "electra": _ELECTRA,
    "distilbert": _DISTILBERT,
    "modernbert": _MODERNBERT,
    "deberta-v2": _DEBERTA,
    "t5": _T5,
    "mt5": _MT5,
    "bart": _BART,
    "marian": _MARIAN,
    "whisper": _WHISPER,
    **MEDIA,
}


def saved(config: Mapping[str, Any]) -> Saved | None:
    """Return the tensors saved by the config's class. None without a table for it, or without a class."""
    encoder, named = ENCODERS.get(str(config.get("model_type"))), architectures(config)
    return encoder.saved(config, named[0]) if encoder is not None and named else None


def knows_class(cls: str) -> bool:
    return any(cls in (one.stem + head for head in one.heads) for one in ENCODERS.values())
