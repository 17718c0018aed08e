//! The network of a seed: every gRPC call of the gateways goes through it, message by message, and may come late, break
//! at one end before the other hears of it, or (which HTTP/2 never does, but a proxy or a retry may) come twice or in
//! another order.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use eyrie_wire::{Address, Dial, Dialing, PeerChannel, Reason, refuse};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;
use tonic::body::Body;
use tower::ServiceExt;

use crate::rng::Rng;
use crate::trace::{Trace, summary};

/// Messages between the ends of a lane.
const WINDOW: usize = 16;
/// Bytes before a message: a flag and its length.
const PREFIX: usize = 5;

/// What the network does to messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weather {
    /// Longest delay of a message (ms).
    pub(crate) latency: u32,
    /// Longest time until the other end hears of a break (ms).
    pub(crate) lateness: u32,
    /// Messages in a thousand with which their stream breaks, while `breaks` are left.
    pub(crate) breaking: u32,
    pub(crate) breaks: u32,
    /// Messages in a thousand that come twice, and that come after their successor.
    pub(crate) doubling: u32,
    pub(crate) swapping: u32,
}

impl Weather {
    pub(crate) const CALM: Self =
        Self { latency: 1, lateness: 0, breaking: 0, breaks: 0, doubling: 0, swapping: 0 };
}

/// One call between a gateway and a service.
#[derive(Debug)]
struct Link {
    name: String,
    from: u64,
    to: String,
    /// Whether it carries rounds, the only messages that come twice or in another order.
    is_rounds: bool,
    /// The end of the caller, and of the service, has learnt that it is broken.
    client: CancellationToken,
    server: CancellationToken,
    over: CancellationToken,
}

struct State {
    rng: Rng,
    weather: Weather,
    nodes: BTreeMap<String, PeerChannel>,
    links: Vec<Weak<Link>>,
    opened: u64,
    counts: BTreeMap<&'static str, u64>,
}

#[derive(Clone)]
pub(crate) struct Network {
    state: Arc<Mutex<State>>,
    trace: Trace,
}

/// The network as one gateway sees it.
pub(crate) struct Port {
    pub(crate) network: Network,
    /// Boot id of the gateway.
    pub(crate) from: u64,
}

type Piece = Result<Frame<Bytes>, Status>;

/// The receiving end of a lane, as a body.
struct Pipe {
    pieces: mpsc::Receiver<Piece>,
    cut: CancellationToken,
    is_done: bool,
    /// Tells the lanes that the caller is gone.
    _left: Option<DropGuard>,
}

impl http_body::Body for Pipe {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Piece>> {
        if self.is_done {
            return Poll::Ready(None);
        }
        let piece = ready!(self.pieces.poll_recv(cx));
        self.is_done = piece.is_none();
        Poll::Ready(piece.or_else(|| self.cut.is_cancelled().then(|| Err(broken()))))
    }
}

fn broken() -> Status {
    refuse(Reason::Unreachable, "the connection broke")
}

impl Dial for Port {
    fn dial<'a>(&'a self, address: &'a Address) -> Dialing<'a> {
        let Address::Tcp(to) = address else { unreachable!("nodes have names") };
        Box::pin(async move {
            sleep(self.network.delay()).await;
            if !self.network.lock().nodes.contains_key(to) {
                return Err(refuse(Reason::Unreachable, format!("cannot reach {address}: nobody listens")));
            }
            let (network, from, to) = (self.network.clone(), self.from, to.clone());
            Ok(PeerChannel::new(tower::service_fn(move |request| {
                Box::pin(network.clone().carry(from, to.clone(), request))
                    as Pin<Box<dyn Future<Output = _> + Send>>
            })))
        })
    }
}

impl Network {
    pub(crate) fn new(rng: Rng, weather: Weather, trace: Trace) -> Self {
        let (nodes, counts) = (BTreeMap::new(), BTreeMap::new());
        let state = State { rng, weather, nodes, links: Vec::new(), opened: 0, counts };
        Self { state: Arc::new(Mutex::new(state)), trace }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Counts what happened, to tell afterwards that it did.
    pub(crate) fn count(&self, what: &'static str, n: u64) {
        *self.lock().counts.entry(what).or_default() += n;
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.lock().counts.clone()
    }

    pub(crate) fn set_weather(&self, weather: Weather) {
        self.lock().weather = weather;
    }

    /// From now on `name` is reached at `channel`.
    pub(crate) fn listen(&self, name: &str, channel: PeerChannel) {
        self.trace.note(|| format!("{name} listens"));
        self.lock().nodes.insert(name.to_owned(), channel);
    }

    /// A process that dies: its streams break and nobody listens any more.
    pub(crate) fn vanish(&self, name: &str) {
        self.trace.note(|| format!("{name} is gone"));
        self.lock().nodes.remove(name);
        self.each_link(|link| link.to == name, |link| link.server.cancel());
    }

    /// A gateway that dies.
    pub(crate) fn leave(&self, from: u64) {
        self.trace.note(|| format!("gateway {from} is gone"));
        self.each_link(|link| link.from == from, |link| link.client.cancel());
    }

    /// Breaks every stream to `name`, which lives on.
    pub(crate) fn shake(&self, name: &str) {
        self.trace.note(|| format!("streams to {name} break"));
        self.each_link(|link| link.to == name, |link| self.break_link(link));
    }

    fn each_link(&self, chosen: impl Fn(&Link) -> bool, act: impl Fn(&Link)) {
        let links: Vec<Arc<Link>> = self.lock().links.iter().filter_map(Weak::upgrade).collect();
        links.iter().filter(|link| chosen(link)).for_each(|link| act(link));
    }

    /// One end learns of it first; its lane tells the other.
    fn break_link(&self, link: &Link) {
        self.trace.note(|| format!("{} breaks", link.name));
        match self.lock().rng.chance(500) {
            true => link.client.cancel(),
            false => link.server.cancel(),
        }
    }

    fn delay(&self) -> Duration {
        let mut state = self.lock();
        let most = state.weather.latency;
        state.rng.millis(0..=most)
    }

    fn lateness(&self) -> Duration {
        let mut state = self.lock();
        let most = state.weather.lateness;
        state.rng.millis(0..=most)
    }

    fn open(&self, from: u64, to: &str, path: &str) -> Option<(PeerChannel, Arc<Link>)> {
        let mut state = self.lock();
        let channel = state.nodes.get(to)?.clone();
        state.opened += 1;
        let (method, id) = (path.rsplit('/').next().unwrap_or(path), state.opened);
        let link = Arc::new(Link {
            name: format!("#{id} {method} {from}>{to}"),
            from,
            to: to.to_owned(),
            is_rounds: method == "Rounds",
            client: CancellationToken::new(),
            server: CancellationToken::new(),
            over: CancellationToken::new(),
        });
        state.links.retain(|link| link.strong_count() > 0);
        state.links.push(Arc::downgrade(&link));
        Some((channel, link))
    }

    /// One call.
    async fn carry(
        self,
        from: u64,
        to: String,
        request: http::Request<Body>,
    ) -> Result<http::Response<Body>, Status> {
        let (channel, link) = self.open(from, &to, request.uri().path()).ok_or_else(broken)?;
        let left = link.client.clone().drop_guard();
        let (up, requests) = mpsc::channel(WINDOW);
        let (down, pieces) = mpsc::channel(WINDOW);
        let (parts, body) = request.into_parts();
        let pipe = Pipe { pieces: requests, cut: link.server.clone(), is_done: false, _left: None };
        let request = http::Request::from_parts(parts, Body::new(pipe));
        let (head, answer) = oneshot::channel();
        tokio::spawn(self.clone().up(Arc::clone(&link), body, up));
        tokio::spawn(self.clone().serve(Arc::clone(&link), channel, request, head, down));
        let parts = tokio::select! {
            biased;
            () = link.client.cancelled() => return Err(broken()),
            answer = answer => answer.map_err(|_| broken())?,
        };
        let pipe = Pipe { pieces, cut: link.client.clone(), is_done: false, _left: Some(left) };
        Ok(http::Response::from_parts(parts, Body::new(pipe)))
    }

    /// The lane from the caller to the service. What was on its way when the caller left may still arrive.
    async fn up(self, link: Arc<Link>, mut body: Body, to: mpsc::Sender<Piece>) {
        let mut to = Some(to);
        let is_left = tokio::select! {
            biased;
            () = link.over.cancelled() => return,
            () = link.server.cancelled() => return,
            () = link.client.cancelled() => true,
            () = self.forward(&link, &mut body, &to, '>') => false,
        };
        if !is_left {
            to = None;
            tokio::select! {
                biased;
                () = link.over.cancelled() => return,
                () = link.server.cancelled() => return,
                () = link.client.cancelled() => {}
            }
        }
        let (lateness, drains) = (self.lateness(), self.lock().rng.chance(500));
        let remnant = async {
            if drains && is_left {
                self.forward(&link, &mut body, &to, '>').await;
            }
            std::future::pending::<()>().await;
        };
        let _ = timeout(lateness, remnant).await;
        link.server.cancel();
    }

    /// The service's end: its answer, and the lane back to the caller.
    async fn serve(
        self,
        link: Arc<Link>,
        channel: PeerChannel,
        request: http::Request<Body>,
        head: oneshot::Sender<http::response::Parts>,
        to: mpsc::Sender<Piece>,
    ) {
        let answer = tokio::select! {
            biased;
            () = link.server.cancelled() => None,
            answer = channel.oneshot(request) => answer.ok(),
        };
        if let Some(answer) = answer {
            let (parts, body) = answer.into_parts();
            let _ = head.send(parts);
            self.down(&link, body, to).await;
        } else {
            sleep(self.lateness()).await;
            link.client.cancel();
        }
        link.over.cancel();
    }

    async fn down(&self, link: &Link, mut body: Body, to: mpsc::Sender<Piece>) {
        let mut to = Some(to);
        tokio::select! {
            biased;
            () = link.server.cancelled() => {
                drop(body);
                sleep(self.lateness()).await;
                link.client.cancel();
            }
            () = link.client.cancelled() => {
                to = None;
                // The service writes on until it hears of it.
                link.server.cancelled().await;
            }
            () = self.forward(link, &mut body, &to, '<') => {}
        }
        drop(to);
    }

    /// Carries messages until `body` ends.
    async fn forward(&self, link: &Link, body: &mut Body, to: &Option<mpsc::Sender<Piece>>, way: char) {
        let Some(to) = to else { return };
        let mut lane = Lane { network: self, link, to, way, carried: 0, held: None };
        let mut bytes = BytesMut::new();
        loop {
            let frame = match lane.held.is_some() {
                true => match timeout(Duration::from_millis(50), body.frame()).await {
                    Ok(frame) => frame,
                    Err(_) => {
                        lane.release().await;
                        continue;
                    }
                },
                false => body.frame().await,
            };
            match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => {
                    bytes.extend_from_slice(&data);
                    while let Some(message) = split(&mut bytes) {
                        lane.carry(message).await;
                    }
                }
                Some(Ok(Err(trailers))) => {
                    lane.release().await;
                    lane.put(Ok(trailers)).await;
                }
                Some(Err(status)) => return lane.put(Err(status)).await,
                None => return lane.release().await,
            }
        }
    }
}

/// The first whole message of `bytes`.
fn split(bytes: &mut BytesMut) -> Option<Bytes> {
    let length = bytes.get(1..PREFIX)?.iter().fold(0, |n, &byte| n << 8 | usize::from(byte));
    (bytes.len() >= PREFIX + length).then(|| bytes.split_to(PREFIX + length).freeze())
}

/// One direction of a call.
struct Lane<'a> {
    network: &'a Network,
    link: &'a Link,
    to: &'a mpsc::Sender<Piece>,
    way: char,
    carried: u32,
    held: Option<Bytes>,
}

/// What happens to a message.
enum Fate {
    Arrives,
    Doubles,
    Waits,
    Breaks,
}

impl Lane<'_> {
    fn fate(&self) -> Fate {
        let mut state = self.network.lock();
        let weather = state.weather;
        if weather.breaks > 0 && state.rng.chance(weather.breaking) {
            state.weather.breaks -= 1;
            *state.counts.entry("breaks").or_default() += 1;
            return Fate::Breaks;
        }
        // The hello is what makes a stream.
        if self.carried == 0 || !self.link.is_rounds {
            return Fate::Arrives;
        }
        if state.rng.chance(weather.doubling) {
            *state.counts.entry("doubled").or_default() += 1;
            return Fate::Doubles;
        }
        if state.rng.chance(weather.swapping) && self.held.is_none() {
            *state.counts.entry("swapped").or_default() += 1;
            return Fate::Waits;
        }
        Fate::Arrives
    }

    async fn carry(&mut self, message: Bytes) {
        let fate = self.fate();
        self.carried += 1;
        sleep(self.network.delay()).await;
        match fate {
            Fate::Breaks => {
                self.network.break_link(self.link);
                std::future::pending::<()>().await;
            }
            Fate::Waits => self.held = Some(message),
            Fate::Arrives => {
                self.put_message(message).await;
                self.release().await;
            }
            Fate::Doubles => {
                self.put_message(message.clone()).await;
                self.put_message(message).await;
                self.release().await;
            }
        }
    }

    async fn release(&mut self) {
        if let Some(message) = self.held.take() {
            self.put_message(message).await;
        }
    }

    async fn put_message(&self, message: Bytes) {
        let Self { link, way, .. } = self;
        self.network
            .trace
            .note(|| format!("{} {way} {}", link.name, summary(&link.name, *way, &message[PREFIX..])));
        self.put(Ok(Frame::data(message))).await;
    }

    async fn put(&self, piece: Piece) {
        if self.to.send(piece).await.is_err() {
            // The other end reads no more; who that is will say so.
            std::future::pending::<()>().await;
        }
    }
}
