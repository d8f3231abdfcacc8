//! Lists of numbers in a snapshot, encoded as one byte string: decoding a thousand numbers one by
//! one takes longer than all else about a vCPU.

use std::fmt;
use std::marker::PhantomData;

use serde::Serializer;
use serde::de::{Deserializer, Error, Visitor};

/// An element of a packed list; all elements have one size.
pub trait Packed: Copy {
    const LEN: usize;

    fn put(self, bytes: &mut Vec<u8>);

    /// From exactly [`Self::LEN`] bytes.
    fn get(bytes: &[u8]) -> Self;
}

impl Packed for u8 {
    const LEN: usize = 1;

    fn put(self, bytes: &mut Vec<u8>) {
        bytes.push(self);
    }

    fn get(bytes: &[u8]) -> Self {
        bytes.first().copied().unwrap_or_default()
    }
}

impl Packed for u32 {
    const LEN: usize = 4;

    fn put(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> Self {
        bytes.try_into().map(Self::from_le_bytes).unwrap_or_default()
    }
}

impl Packed for u64 {
    const LEN: usize = 8;

    fn put(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.to_le_bytes());
    }

    fn get(bytes: &[u8]) -> Self {
        bytes.try_into().map(Self::from_le_bytes).unwrap_or_default()
    }
}

impl<A: Packed, B: Packed> Packed for (A, B) {
    const LEN: usize = A::LEN + B::LEN;

    fn put(self, bytes: &mut Vec<u8>) {
        self.0.put(bytes);
        self.1.put(bytes);
    }

    fn get(bytes: &[u8]) -> Self {
        let (first, second) = bytes.split_at_checked(A::LEN).unwrap_or_default();
        (A::get(first), B::get(second))
    }
}

pub fn serialize<T: Packed, S: Serializer>(list: &[T], to: S) -> Result<S::Ok, S::Error> {
    let mut bytes = Vec::with_capacity(list.len() * T::LEN);
    list.iter().for_each(|number| number.put(&mut bytes));
    to.serialize_bytes(&bytes)
}

pub fn deserialize<'de, T, D>(from: D) -> Result<Vec<T>, D::Error>
where
    T: Packed,
    D: Deserializer<'de>,
{
    from.deserialize_bytes(List(PhantomData))
}

struct List<T>(PhantomData<T>);

impl<T: Packed> Visitor<'_> for List<T> {
    type Value = Vec<T>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "numbers of {} bytes each", T::LEN)
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<T>, E> {
        let each = bytes.chunks_exact(T::LEN);
        match each.remainder() {
            [] => Ok(each.map(T::get).collect()),
            _ => Err(E::invalid_length(bytes.len(), &self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Numbers(#[serde(with = "super")] Vec<(u32, u64)>);

    #[test]
    fn list_comes_back_as_it_was() {
        let list = Numbers(vec![(1, 2), (u32::MAX, u64::MAX)]);
        let packed = rmp_serde::to_vec(&list).unwrap();
        assert_eq!(packed.len(), 2 + 2 * 12);
        assert_eq!(rmp_serde::from_slice::<Numbers>(&packed).unwrap(), list);
        let unpacked = rmp_serde::to_vec(&[(1u32, 2u64)]).unwrap();
        assert!(rmp_serde::from_slice::<Numbers>(&unpacked).is_err());
    }

    #[test]
    fn list_that_is_cut_is_refused() {
        let cut = rmp_serde::to_vec(&Bytes([0; 23])).unwrap();
        let error = rmp_serde::from_slice::<Numbers>(&cut).unwrap_err();
        assert!(error.to_string().contains("numbers of 12 bytes"), "{error}");
    }

    struct Bytes([u8; 23]);

    impl Serialize for Bytes {
        fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            to.serialize_bytes(&self.0)
        }
    }
}
