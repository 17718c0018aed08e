//! Copies for drafts that share no memory with the target.

use eyrie_wire::v1::feature_ref::At;
use eyrie_wire::v1::{
    DescribeRequest, Features, ReadFeaturesRequest, ReadSharedRequest, RingSlot, target_item::Op,
    target_out::Body,
};
use eyrie_wire::{Message, grant_from_wire, reason_of, slots_per_read};
use http_body_util::Full;
use tonic::Status;
use tonic::body;
use tonic::client::GrpcService;
use tonic::codegen::http::{self, Response};
use tonic::transport::{Channel, Endpoint};

use crate::features::{ask_as, attach, with_features};
use crate::harness::{LIMIT, Server, fetch, goldens, greedy};

#[tokio::test(flavor = "multi_thread")]
async fn a_remote_lease_names_no_door_and_shows_in_the_card() {
    let server = Server::start().await;
    let mut client = server.client.clone();
    let (frames, grants, grant) = ask_as(&server, "draft", true).await.unwrap();
    assert!(grant.door.is_empty() && grant.token.is_empty(), "{grant:?}");
    let mapped = attach(&server).await;
    assert_eq!((&grant.weights, &grant.ring), (&mapped.grant.weights, &mapped.grant.ring));
    let card = client.describe(DescribeRequest {}).await.unwrap().into_inner();
    let told: Vec<bool> = card.leases.iter().map(|lease| lease.remote).collect();
    assert_eq!((told, card.left_behind.len()), (vec![true, false], 0));
    drop((frames, grants, mapped));
    server.load_until(|load| load.leases == 0).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shared_region_is_read_as_it_is_mapped() {
    let server = Server::start().await;
    let mut client = server.client.clone();
    let lease = attach(&server).await;
    let mut read = async |epoch| -> Result<Vec<u8>, Status> {
        let mut chunks = client.read_shared(ReadSharedRequest { epoch }).await?.into_inner();
        let mut data = Vec::new();
        while let Some(chunk) = chunks.message().await? {
            assert!(chunk.data.len() <= 1 << 20);
            data.extend_from_slice(&chunk.data);
        }
        Ok(data)
    };
    assert!(read(server.ready.epoch).await.unwrap() == lease.weights.bytes());
    for epoch in [0, server.ready.epoch ^ 1] {
        let stale = read(epoch).await.unwrap_err();
        assert_eq!(reason_of(&stale).as_deref(), Some("STALE_EPOCH"), "{stale}");
    }
    drop(lease);
    server.stop().await;
}

fn slots_of(features: &Features) -> Vec<RingSlot> {
    let slot = |at: &Option<At>| match at {
        Some(At::Ring(slot)) => *slot,
        other => panic!("{other:?} is not in the ring"),
    };
    features.refs.iter().map(|part| slot(&part.at)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_read_as_they_lie_in_the_ring_and_none_once_they_are_overwritten() {
    let server = Server::start_with(|options| {
        (options.prefill_chunk, options.max_sequences) = (16, 1);
        options.ring_bytes = Some(256 << 10);
    })
    .await;
    let mut client = server.client.clone();
    let lease = attach(&server).await;
    let mut rounds = server.rounds(1).await;
    rounds.send(1, Op::Open(with_features(greedy(&goldens(1)[0].prompt[..16], 60)))).await;
    let prompt = rounds.features().await;
    assert!(matches!(rounds.body().await, Body::Committed(_)));
    let mut read = async |epoch, slots| -> Result<Vec<f32>, Status> {
        let request = ReadFeaturesRequest { epoch, slots };
        let slots = client.read_features(request).await?.into_inner().slots;
        let values = slots.iter().flat_map(|slot| slot.rows.chunks_exact(4));
        Ok(values.map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect())
    };
    let (epoch, slots) = (server.ready.epoch, slots_of(&prompt));
    assert!(read(epoch, slots.clone()).await.unwrap() == lease.rows(&prompt.refs, 0));

    // Published again until the whole ring was written over.
    let geometry = grant_from_wire(&lease.grant).unwrap().ring.unwrap();
    for _ in 0..geometry.slots {
        rounds.send(1, fetch(0)).await;
        rounds.features().await;
    }
    assert_eq!(read(epoch, slots.clone()).await.unwrap(), [0.0; 0]);

    let wild = RingSlot { slot: geometry.slots, generation: 2 };
    let many = vec![slots[0]; slots_per_read(&geometry) + 1];
    for (epoch, slots, reason) in [
        (epoch ^ 1, slots, "STALE_EPOCH"),
        (epoch, vec![wild], "INVALID_ARGUMENT"),
        (epoch, many, "INVALID_ARGUMENT"),
    ] {
        let status = read(epoch, slots).await.unwrap_err();
        assert_eq!(reason_of(&status).as_deref(), Some(reason), "{status}");
    }
    drop((lease, rounds));
    server.stop().await;
}

/// Asks for features over `channel`, and reads no more than the headers of the reply.
async fn ask_only(channel: &mut Channel, request: &ReadFeaturesRequest) -> Response<body::Body> {
    let message = request.encode_to_vec();
    let prefix = [&[0], (message.len() as u32).to_be_bytes().as_slice()].concat();
    let call = http::Request::post("/eyrie.v1.Target/ReadFeatures")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body::Body::new(Full::from([prefix, message].concat())))
        .unwrap();
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    channel.call(call).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_that_wait_for_their_reader_are_bounded_as_well() {
    let server = Server::start().await;
    let _lease = attach(&server).await;
    let mut rounds = server.rounds(1).await;
    rounds.send(1, Op::Open(with_features(greedy(&goldens(1)[0].prompt, 9)))).await;
    let slot = slots_of(&rounds.features().await)[0];
    let request = ReadFeaturesRequest { epoch: server.ready.epoch, slots: vec![slot; 20] };
    let window = 65_535;
    let endpoint = Endpoint::from_shared(server.ready.address.to_string()).unwrap();
    let endpoint = endpoint.initial_stream_window_size(window).initial_connection_window_size(window);
    let mut channel = endpoint.connect().await.unwrap();
    let mut unread = Vec::new();
    // Eight, and one more that the transport has taken as a whole.
    while let Ok(reply) = tokio::time::timeout(LIMIT / 100, ask_only(&mut channel, &request)).await {
        unread.push(reply);
        assert!(unread.len() < 12);
    }
    drop(unread);
    let read = tokio::time::timeout(LIMIT, server.client.clone().read_features(request)).await;
    assert_eq!(read.unwrap().unwrap().into_inner().slots.len(), 20);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_without_features_says_so() {
    let server = Server::start_with(|options| options.capture = Some(Vec::new())).await;
    let request = ReadFeaturesRequest { epoch: server.ready.epoch, slots: Vec::new() };
    let status = server.client.clone().read_features(request).await.unwrap_err();
    assert_eq!(reason_of(&status).as_deref(), Some("UNSUPPORTED"), "{status}");
    server.stop().await;
}
