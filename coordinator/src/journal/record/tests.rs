use proptest::prelude::*;

use super::*;

fn reasons() -> impl Strategy<Value = FinishReason> {
    prop_oneof![Just(FinishReason::Stop), Just(FinishReason::Length), Just(FinishReason::Cancelled)]
}

fn generations() -> impl Strategy<Value = Generation> {
    let number = || {
        any::<i32>().prop_map(|value| f32::from_bits(0x3F80_0000 ^ (value.unsigned_abs() % 0xFFFF)))
    };
    let bias = prop::collection::vec((any::<u32>(), number()), 0..4);
    let sampling =
        (prop::array::uniform6(number()), any::<u32>(), bias, any::<u64>(), any::<u32>()).prop_map(
            |(numbers, top_k, logit_bias, seed, choice)| Sampling {
                temperature: numbers[0],
                top_k,
                top_p: numbers[1],
                min_p: numbers[2],
                repetition_penalty: numbers[3],
                presence_penalty: numbers[4],
                frequency_penalty: -numbers[5],
                logit_bias,
                seed,
                choice,
            },
        );
    let ids = || prop::collection::vec(any::<u32>(), 0..9);
    let stop = (1_u32..500, prop::collection::vec(".{1,9}", 0..3), ids(), any::<bool>()).prop_map(
        |(max_tokens, stop_strings, stop_token_ids, ignore_eos)| StopRules {
            max_tokens: Some(max_tokens),
            stop_strings,
            stop_token_ids,
            ignore_eos,
        },
    );
    let output = (any::<Option<u32>>(), any::<bool>(), any::<bool>()).prop_map(
        |(logprobs, logits_digest, skip_special_tokens)| OutputRules {
            logprobs,
            logits_digest,
            skip_special_tokens,
        },
    );
    (".{0,40}", ids(), sampling, stop, output).prop_map(|(id, prompt, sampling, stop, output)| {
        Generation { id, prompt, sampling, stop, output, known: Known::Nothing }
    })
}

fn files() -> impl Strategy<Value = Recovered> {
    let ending = (reasons(), any::<Option<String>>(), any::<Option<String>>());
    (
        generations(),
        prop::collection::vec(any::<u32>(), 0..20),
        prop::option::of(ending),
        any::<bool>(),
    )
        .prop_map(|(generation, mut tokens, ending, complete)| {
            tokens.truncate(generation.stop.max_tokens.unwrap_or(0) as usize);
            let completion_tokens = u32::try_from(tokens.len()).unwrap() + u32::from(!complete);
            let ending = ending.map(|(reason, matched_stop, logits_sha256)| Ending {
                reason,
                matched_stop,
                completion_tokens,
                logits_sha256,
            });
            let accepted = Accepted {
                container_digest: "ab".repeat(32),
                math_id: "v1".to_owned(),
                generation,
            };
            Recovered { accepted, tokens, ending }
        })
}

/// The file as it comes about: the tokens in batches of the given sizes.
fn written(recovered: &Recovered, batches: &[usize]) -> Vec<u8> {
    let head = Recovered { tokens: Vec::new(), ending: None, ..recovered.clone() };
    let mut bytes = file(&head);
    let (mut at, mut sizes) = (0, batches.iter().cycle());
    while at < recovered.tokens.len() {
        let end = (at + sizes.next().unwrap()).min(recovered.tokens.len());
        let first = u32::try_from(at).unwrap();
        bytes.extend(encode(&Record::Tokens { first, ids: recovered.tokens[at..end].to_vec() }));
        at = end;
    }
    if let Some(ending) = &recovered.ending {
        bytes.extend(encode(&Record::Finished(ending.clone())));
    }
    bytes
}

proptest! {
    #[test]
    fn what_is_written_is_read(recovered in files(), batches in prop::collection::vec(1_usize..7, 1..4)) {
        prop_assert_eq!(&read(&file(&recovered)).unwrap(), &recovered);
        prop_assert_eq!(&read(&written(&recovered, &batches)).unwrap(), &recovered);
    }

    #[test]
    fn a_file_that_is_cut_anywhere_gives_what_was_whole(recovered in files(), batch in 1_usize..5, zeros in 0_usize..40) {
        let bytes = written(&recovered, &[batch]);
        let head = file(&Recovered { tokens: Vec::new(), ending: None, ..recovered.clone() }).len();
        for cut in 0..bytes.len() {
            let mut torn = bytes[..cut].to_vec();
            match read(&torn) {
                Err(damage) => {
                    prop_assert!(cut < head, "cut at {cut} of {head}: {damage}");
                    prop_assert_eq!(damage.offset, 0);
                }
                Ok(found) => {
                    prop_assert!(cut >= head);
                    prop_assert_eq!(&found.accepted, &recovered.accepted);
                    prop_assert!(recovered.tokens.starts_with(&found.tokens));
                    prop_assert!(found.tokens.len() + 7 * batch >= found.tokens.len());
                    // The length came to the drive before the bytes: zeros are no record.
                    torn.resize(cut.max(head) + zeros, 0);
                    let padded = read(&torn);
                    prop_assert!(padded.is_err() || recovered.tokens.starts_with(&padded.unwrap().tokens));
                }
            }
        }
    }

    /// Never a panic, never a token that was not written: a flipped bit is found, or it is in a tail that looks cut.
    #[test]
    fn a_flipped_bit_is_found(recovered in files(), batch in 1_usize..5, place in any::<prop::sample::Index>(), bit in 0_u8..8) {
        let mut bytes = written(&recovered, &[batch]);
        let at = place.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(found) = read(&bytes) {
            prop_assert_eq!(found.accepted, recovered.accepted);
            prop_assert!(recovered.tokens.starts_with(&found.tokens));
            prop_assert!(found.ending.is_none() || found.ending == recovered.ending);
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read(&bytes).is_err(), "random bytes have no checksum");
    }

    /// The same with checksums that fit.
    #[test]
    fn any_payload_is_read_without_a_panic(kind in 0_u8..5, payload in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(record) = decode(kind, &payload) {
            prop_assert_eq!(&encode(&record)[HEADER_BYTES..], &payload[..], "one record, one form");
        }
    }
}

fn sample() -> Recovered {
    let generation = Generation {
        id: "a".to_owned(),
        prompt: vec![1, 2, 3],
        stop: StopRules { max_tokens: Some(4), ..StopRules::default() },
        ..Generation::default()
    };
    let accepted =
        Accepted { container_digest: "c".to_owned(), math_id: "m".to_owned(), generation };
    Recovered { accepted, tokens: vec![7, 8], ending: None }
}

/// Reads a whole sample with records behind it.
fn check(records: &[Record], refused: &str) {
    let mut bytes = file(&sample());
    let offset = bytes.len();
    for record in records {
        bytes.extend(encode(record));
    }
    match read(&bytes) {
        Ok(found) => assert_eq!(refused, "", "{found:?}"),
        Err(damage) => {
            assert_eq!((damage.what.as_str(), damage.offset >= offset), (refused, true));
        }
    }
}

#[test]
fn records_follow_one_another() {
    let tokens = |first, ids: &[u32]| Record::Tokens { first, ids: ids.to_vec() };
    let end = |completion_tokens| {
        Record::Finished(Ending {
            reason: FinishReason::Length,
            matched_stop: None,
            completion_tokens,
            logits_sha256: None,
        })
    };
    check(&[], "");
    check(&[tokens(2, &[9, 10]), end(4)], "");
    check(&[tokens(2, &[9])], "");
    check(&[end(4)], "");
    check(&[tokens(3, &[9])], "token 3 follows 2 tokens");
    check(&[tokens(1, &[8])], "token 1 follows 2 tokens");
    check(&[tokens(2, &[9, 10, 11])], "5 tokens of at most 4");
    check(&[end(1)], "2 tokens of 1 in all");
    check(&[end(2), end(2)], "a record stands behind the end");
    check(&[Record::Accepted(sample().accepted)], "a second request");
    let damage = read(&encode(&tokens(0, &[1]))).unwrap_err();
    assert_eq!(damage.to_string(), "at byte 0: the first record does not say what was accepted");
}

#[test]
fn another_version_is_refused_by_its_number() {
    let mut bytes = file(&sample());
    bytes[4] = 9;
    let length = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
    let sum = checksum(&bytes[..8], &bytes[HEADER_BYTES..][..length]).to_le_bytes();
    bytes[8..16].copy_from_slice(&sum);
    assert_eq!(read(&bytes).unwrap_err().what, "version 9; this build reads version 1");
}

#[test]
fn damage_in_the_middle_is_named() {
    let mut bytes = file(&sample());
    let offset = bytes.len();
    bytes.extend(encode(&Record::Tokens { first: 2, ids: vec![9] }));
    bytes.extend(encode(&Record::Tokens { first: 3, ids: vec![10] }));
    bytes[offset + HEADER_BYTES + 5] ^= 1;
    assert_eq!(
        read(&bytes).unwrap_err(),
        Damage { offset, what: "the checksum does not fit".to_owned() }
    );
}
