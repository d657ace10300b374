//! HOT PATH: buffers that become the payload of a result without a copy, and come back when the bytes have left.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Element of a payload: fixed-point sums or plain outputs.
pub(crate) trait Element: bytemuck::Pod + Default + Send + 'static {
    fn little_endian(self) -> Self;
}

impl Element for i64 {
    fn little_endian(self) -> Self {
        self.to_le()
    }
}

impl Element for f32 {
    fn little_endian(self) -> Self {
        Self::from_bits(self.to_bits().to_le())
    }
}

/// A buffer may be so much larger than what lies in it, bytes: shrinking and growing it again costs more.
const SLACK_BYTES: usize = 64 << 10;

/// Buffers that are used again and again. Those in use are about as large as what lies in them, and the others are kept only
/// as far as all together take no more than one of the largest: however many are in use at times, they do not each grow to
/// the size of the largest work.
#[derive(Debug)]
pub(crate) struct Buffers<T> {
    /// Elements of the largest buffer.
    largest: usize,
    pool: Mutex<Pool<T>>,
}

#[derive(Debug)]
struct Pool<T> {
    free: Vec<Vec<T>>,
    /// Elements that all buffers have room for, those in use as well.
    total: usize,
}

impl<T: Element> Buffers<T> {
    pub(crate) fn new(largest: usize) -> Arc<Self> {
        Arc::new(Self { largest, pool: Mutex::new(Pool { free: Vec::new(), total: 0 }) })
    }

    fn pool(&self) -> MutexGuard<'_, Pool<T>> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of `len` elements with old contents.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Buffer<T> {
        let mut pool = self.pool();
        let fits = |data: &&Vec<T>| data.capacity() >= len;
        let best = pool.free.iter().filter(fits).map(Vec::capacity).min();
        let best = best.or_else(|| pool.free.iter().map(Vec::capacity).max());
        let place = best.and_then(|best| pool.free.iter().position(|d| d.capacity() == best));
        let mut data = place.map(|place| pool.free.swap_remove(place)).unwrap_or_default();
        pool.total -= data.capacity();
        if data.capacity() < len {
            // Its contents are of no use, so there is nothing to move.
            data = Vec::new();
            while pool.total + len > self.largest
                && let Some(dropped) = pool.free.pop()
            {
                pool.total -= dropped.capacity();
            }
            data.reserve_exact(len);
        }
        data.resize(len, T::default());
        data.shrink_to(len + SLACK_BYTES / size_of::<T>());
        pool.total += data.capacity();
        drop(pool);
        Buffer { data, home: Arc::clone(self) }
    }
}

/// A buffer on loan.
#[derive(Debug)]
pub(crate) struct Buffer<T: Element> {
    data: Vec<T>,
    home: Arc<Buffers<T>>,
}

impl<T: Element> Buffer<T> {
    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.data
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        &self.data
    }

    /// The elements in little-endian order.
    pub(crate) fn into_bytes(mut self) -> Bytes {
        if cfg!(target_endian = "big") {
            self.data.iter_mut().for_each(|value| *value = value.little_endian());
        }
        Bytes::from_owner(self)
    }
}

impl<T: Element> AsRef<[u8]> for Buffer<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.data)
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        let mut pool = self.home.pool();
        if pool.total > self.home.largest {
            pool.total -= data.capacity();
        } else {
            pool.free.push(data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_its_bytes_are_gone() {
        let buffers = Buffers::<i64>::new(100);
        let mut buffer = buffers.take(2);
        buffer.as_mut_slice().copy_from_slice(&[1, -2]);
        let address = buffer.as_slice().as_ptr();
        let bytes = buffer.into_bytes();
        assert_eq!(bytes[..8], 1i64.to_le_bytes());
        assert_eq!(bytes[8..], (-2i64).to_le_bytes());
        let other = buffers.take(2);
        assert_ne!(other.as_slice().as_ptr(), address);
        drop(bytes);
        assert_eq!(buffers.take(1).as_slice().as_ptr(), address);
    }

    #[test]
    fn many_at_a_time_do_not_each_stay_as_large_as_the_largest() {
        const LARGEST: usize = 1 << 20;
        let buffers = Buffers::<f32>::new(LARGEST);
        for _ in 0..20 {
            // Whichever of them is the last to come back: a large work takes its turn with small ones beside it.
            let small: Vec<_> = (0..6).map(|_| buffers.take(100)).collect();
            let large = buffers.take(LARGEST);
            let total = buffers.pool().total;
            assert!(total <= LARGEST + 6 * (100 + SLACK_BYTES / 4), "{total}");
            drop(small);
            drop(large);
            let total = buffers.pool().total;
            assert!(total <= LARGEST, "{total}");
        }
        assert_eq!(buffers.take(LARGEST).as_slice().len(), LARGEST);
    }
}
