//! Reading `tokenizer.json`: nothing in it is trusted.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokenizers::{
    DecoderWrapper, Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper,
    PostProcessorWrapper, PreTokenizerWrapper,
};

use super::markers::{AddedToken, Trie};
use super::pieces::{self, Decoder, TOKENIZER_FILE};
use super::{TextError, Tokenizer, TokenizerConfig};

/// Ids from here on are refused: tables are as long as the largest id, and no vocabulary is near it.
const ID_LIMIT: u32 = 1 << 22;

pub(super) fn load(
    tokenizer_json: &[u8],
    tokenizer_config: Option<&[u8]>,
) -> Result<Tokenizer, TextError> {
    let config = tokenizer_config.map(TokenizerConfig::parse).transpose()?.unwrap_or_default();
    let value: Value = serde_json::from_slice(tokenizer_json)
        .map_err(|error| TextError::file(TOKENIZER_FILE, "", error.to_string()))?;
    let Value::Object(file) = value else {
        return Err(TextError::file(TOKENIZER_FILE, "", "expected a JSON object"));
    };
    match catch_unwind(AssertUnwindSafe(|| assemble(file, config))) {
        Ok(tokenizer) => tokenizer,
        Err(_) => {
            Err(TextError::file(TOKENIZER_FILE, "", "the tokenizer library fails on this file"))
        }
    }
}

fn assemble(mut file: Map<String, Value>, config: TokenizerConfig) -> Result<Tokenizer, TextError> {
    match file.get("version").and_then(Value::as_str) {
        None | Some("1.0") => {}
        Some(other) => {
            return Err(TextError::file(
                TOKENIZER_FILE,
                "version",
                format!("{other:?} is not known, expected \"1.0\""),
            ));
        }
    }
    let decoder = Decoder::parse(file.get("decoder").unwrap_or(&Value::Null))?;
    let requested = requested_tokens(&mut file, &config)?;

    let model: ModelWrapper = component(&mut file, "model")?
        .ok_or_else(|| TextError::file(TOKENIZER_FILE, "model", "a model is required"))?;
    let normalizer: Option<NormalizerWrapper> = component(&mut file, "normalizer")?;
    let pre_tokenizer: Option<PreTokenizerWrapper> = component(&mut file, "pre_tokenizer")?;
    let post_processor: Option<PostProcessorWrapper> = component(&mut file, "post_processor")?;
    let wrapped_decoder: Option<DecoderWrapper> = component(&mut file, "decoder")?;

    let library = |error: tokenizers::Error| {
        TextError::file(TOKENIZER_FILE, "added_tokens", error.to_string())
    };
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_normalizer(normalizer).map_err(library)?;
    inner.with_pre_tokenizer(pre_tokenizer);
    inner.with_post_processor(post_processor);
    inner.with_decoder(wrapped_decoder);
    inner.add_tokens(requested).map_err(library)?;

    let vocabulary = vocabulary(&inner)?;
    let added = added_tokens(&inner).map_err(library)?;
    let find = |normalized: bool| {
        let searched =
            added.iter().enumerate().filter(move |(_, token)| token.normalized == normalized);
        Trie::new(searched.map(|(index, token)| (index, token.pattern.as_str())))
    };
    let (raw_trie, normalized_trie) = (find(false), find(true));
    let control = added.iter().enumerate().filter(|(_, token)| token.is_control());
    let control_trie = Trie::new(control.map(|(index, token)| (index, token.content.as_str())));

    let (piece_starts, piece_data) = piece_table(&vocabulary, &added, &decoder);
    Ok(Tokenizer {
        control_ids: added
            .iter()
            .filter(|token| token.is_control())
            .map(|token| token.id)
            .collect(),
        special_ids: added.iter().filter(|token| token.special).map(|token| token.id).collect(),
        inner,
        added,
        raw_trie,
        normalized_trie,
        control_trie,
        piece_starts,
        piece_data,
        decoder,
        config,
    })
}

/// Takes one component out of the file and reads it.
fn component<T: DeserializeOwned>(
    file: &mut Map<String, Value>,
    field: &'static str,
) -> Result<Option<T>, TextError> {
    match file.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value)
            .map(Some)
            .map_err(|error| TextError::file(TOKENIZER_FILE, field, error.to_string())),
    }
}

/// The added tokens in the order in which they get their ids: those of the file, then what the config adds.
///
/// The config wins where both describe a token, as in transformers.
fn requested_tokens(
    file: &mut Map<String, Value>,
    config: &TokenizerConfig,
) -> Result<Vec<tokenizers::AddedToken>, TextError> {
    let mut tokens: Vec<tokenizers::AddedToken> = Vec::new();
    match file.remove("added_tokens") {
        None | Some(Value::Null) => {}
        Some(Value::Array(entries)) => {
            for (index, entry) in entries.iter().enumerate() {
                let field = format!("added_tokens[{index}]");
                let Value::Object(entry) = entry else {
                    return Err(TextError::file(TOKENIZER_FILE, field, "expected an object"));
                };
                tokens.push(added_token(entry, TOKENIZER_FILE, &field)?);
            }
        }
        Some(_) => return Err(TextError::file(TOKENIZER_FILE, "added_tokens", "expected a list")),
    }
    let known: HashSet<String> = tokens.iter().map(|token| token.content.clone()).collect();
    for (id, entry) in &config.added {
        let token = added_token(entry, super::CONFIG_FILE, &format!("added_tokens_decoder.{id}"))?;
        // A later entry of the same content replaces the flags and keeps the id.
        if !tokens.contains(&token) {
            tokens.push(token);
        }
    }
    let objects = config
        .special_objects
        .iter()
        .map(|entry| added_token(entry, super::CONFIG_FILE, "special token"));
    let objects: Vec<_> = objects.collect::<Result<_, _>>()?;
    let named = config.special.iter().map(|(_, content)| content).chain(&config.extra_special);
    for content in named {
        if content.is_empty()
            || known.contains(content)
            || tokens.iter().any(|token| token.content == *content)
        {
            continue;
        }
        let described = objects.iter().find(|token| token.content == *content).cloned();
        let token =
            described.unwrap_or_else(|| tokenizers::AddedToken::from(content.clone(), true));
        tokens.push(token.special(true));
    }
    Ok(tokens)
}

fn added_token(
    entry: &Map<String, Value>,
    file: &'static str,
    field: &str,
) -> Result<tokenizers::AddedToken, TextError> {
    let Some(content) = entry.get("content").and_then(Value::as_str) else {
        return Err(TextError::file(file, format!("{field}.content"), "expected a string"));
    };
    let flag = |name: &str, default: bool| match entry.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(TextError::file(file, format!("{field}.{name}"), "expected true or false")),
    };
    let special = flag("special", false)?;
    Ok(tokenizers::AddedToken::from(content, special)
        .normalized(flag("normalized", !special)?)
        .single_word(flag("single_word", false)?)
        .lstrip(flag("lstrip", false)?)
        .rstrip(flag("rstrip", false)?))
}

/// All tokens by id, with an upper limit on the ids.
fn vocabulary(inner: &tokenizers::Tokenizer) -> Result<Vec<(u32, String)>, TextError> {
    let mut tokens: Vec<(u32, String)> =
        inner.get_model().get_vocab().into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    let added = inner.get_added_vocabulary().get_vocab().values().copied().max();
    let largest = tokens.last().map(|(id, _)| *id).max(added);
    match largest {
        None => Err(TextError::file(TOKENIZER_FILE, "model.vocab", "the vocabulary is empty")),
        Some(id) if id >= ID_LIMIT => Err(TextError::file(
            TOKENIZER_FILE,
            "model.vocab",
            format!("id {id} is beyond the limit of {ID_LIMIT}"),
        )),
        Some(_) => Ok(tokens),
    }
}

/// The added tokens with the ids that the library gave them, ascending.
fn added_tokens(inner: &tokenizers::Tokenizer) -> tokenizers::Result<Vec<AddedToken>> {
    let mut tokens: Vec<(u32, tokenizers::AddedToken)> =
        inner.get_added_tokens_decoder().into_iter().collect();
    tokens.sort_unstable_by_key(|(id, _)| *id);
    let mut added = Vec::with_capacity(tokens.len());
    for (id, token) in tokens {
        let mut pattern = token.content.clone();
        if let (true, Some(normalizer)) = (token.normalized, inner.get_normalizer()) {
            let mut normal = NormalizedString::from(token.content.as_str());
            normalizer.normalize(&mut normal)?;
            pattern = normal.get().to_owned();
        }
        added.push(AddedToken {
            id,
            content: token.content,
            pattern,
            special: token.special,
            normalized: token.normalized,
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
        });
    }
    Ok(added)
}

/// Bytes of all tokens, one after the other, and where each starts.
fn piece_table(
    vocabulary: &[(u32, String)],
    added: &[AddedToken],
    decoder: &Decoder,
) -> (Vec<usize>, Vec<u8>) {
    let index = |id: u32| usize::try_from(id).expect("below the limit on ids");
    let largest = vocabulary
        .iter()
        .map(|(id, _)| *id)
        .chain(added.iter().map(|token| token.id))
        .max()
        .unwrap_or(0);
    let mut pieces: Vec<Vec<u8>> = vec![Vec::new(); index(largest) + 1];
    let table = pieces::byte_level_table();
    for (id, token) in vocabulary {
        pieces[index(*id)] = decoder.bytes(token, &table);
    }
    for token in added {
        pieces[index(token.id)] = token.content.as_bytes().to_vec();
    }
    let mut starts = Vec::with_capacity(pieces.len() + 1);
    let mut data = Vec::new();
    for piece in pieces {
        starts.push(data.len());
        data.extend(piece);
    }
    starts.push(data.len());
    (starts, data)
}
