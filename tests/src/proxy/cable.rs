//! A unix socket that hands bytes on to another one and can be cut between any two of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use super::Tasks;

const WHOLE: usize = usize::MAX;

/// Carries connections to another socket until it is told to cut them.
#[derive(Debug)]
pub struct Cable {
    /// Bytes that may still come back; [`WHOLE`] for all.
    left: Arc<AtomicUsize>,
    _tasks: Arc<Tasks>,
}

impl Cable {
    /// Listens at `from` for connections to `to`.
    pub fn lay(from: &Path, to: &Path) -> Self {
        let (left, tasks) = (Arc::new(AtomicUsize::new(WHOLE)), Arc::new(Tasks::default()));
        let listener = UnixListener::bind(from).expect("a socket to listen on");
        let carrying = carry(listener, to.to_owned(), Arc::clone(&left));
        tasks.spawn(carrying);
        Self { left, _tasks: tasks }
    }

    /// Whether the cut was made.
    pub fn was_cut(&self) -> bool {
        self.left.load(Ordering::Relaxed) == WHOLE
    }

    /// Cuts every connection once `bytes` more have come back over any of them; later ones are whole.
    pub fn cut_after(&self, bytes: usize) {
        self.left.store(bytes, Ordering::Relaxed);
    }
}

async fn carry(listener: UnixListener, to: PathBuf, left: Arc<AtomicUsize>) {
    let tasks = Tasks::default();
    while let Ok((near, _)) = listener.accept().await {
        let (to, left) = (to.clone(), Arc::clone(&left));
        tasks.spawn(async move {
            let Ok(far) = UnixStream::connect(&to).await else { return };
            let (mut near_read, near_write) = near.into_split();
            let (far_read, mut far_write) = far.into_split();
            // Either half that ends takes the connection with it.
            tokio::select! {
                _ = tokio::io::copy(&mut near_read, &mut far_write) => {}
                () = bring_back(far_read, near_write, &left) => {}
            }
        });
    }
}

async fn bring_back(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, left: &AtomicUsize) {
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let allowed = left.load(Ordering::Relaxed);
        let kept = read.min(allowed);
        if to.write_all(&buffer[..kept]).await.is_err() {
            return;
        }
        if kept == allowed {
            left.store(WHOLE, Ordering::Relaxed);
            return;
        }
        if allowed != WHOLE {
            left.fetch_sub(kept, Ordering::Relaxed);
        }
    }
}
