// SPDX-License-Identifier: Apache-2.0
package rmq.bench;

import com.alibaba.fastjson.JSONObject;
import java.io.IOException;
import java.lang.reflect.Field;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.AppendMessageCallback;
import org.apache.rocketmq.store.AppendMessageResult;
import org.apache.rocketmq.store.CommitLog;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.MessageExtEncoder;
import org.apache.rocketmq.store.PutMessageContext;
import org.apache.rocketmq.store.PutMessageLock;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.index.IndexFile;
import org.apache.rocketmq.store.index.IndexService;
import org.apache.rocketmq.store.logfile.DefaultMappedFile;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** Rounds of what a broker's put, recovery and reput do with records, without its threads and futures. */
final class LogRounds {
    private static final int PAGE = 4096;

    private final Map<String, DefaultMessageStore> stores = new HashMap<>();
    private final Map<String, DefaultMappedFile> segments = new HashMap<>();
    private final Map<String, ByteBuffer> logs = new HashMap<>();
    private MessageExtBrokerInner[] messages;

    /** Makes {@code count} messages for the rounds to come; those of {@code bodies} one after the other, of one size. */
    void messages(JSONObject job) throws IOException {
        ByteBuffer bodies = map(job.getString("bodies"));
        int count = job.getIntValue("count");
        String[] keys = new Keys(Path.of(job.getString("keys"))).strings(0, 2 * count);
        SocketAddress host = new InetSocketAddress(job.getString("address"), job.getIntValue("port"));
        messages = new MessageExtBrokerInner[count];
        for (int i = 0; i < count; i++) {
            MessageExtBrokerInner message = new MessageExtBrokerInner();
            byte[] body = new byte[bodies.capacity() / count];
            bodies.get(i * body.length, body);
            message.setBody(body);
            message.setTopic(job.getString("topic"));
            message.setQueueId(0);
            message.setBornTimestamp(job.getLongValue("time"));
            message.setStoreTimestamp(job.getLongValue("time"));
            message.setBornHost(host);
            message.setStoreHost(host);
            message.setPropertiesString(String.format(job.getString("properties"), keys[i], keys[count + i]));
            messages[i] = message;
        }
    }

    /** CommitLog#asyncPutMessage between taking a message and waking others, {@code passes} times all messages. */
    void append(JSONObject job, JSONObject answer) throws Exception {
        String path = job.getString("file");
        int size = job.getIntValue("size");
        DefaultMessageStore store = store(job);
        DefaultMappedFile segment = segments.get(path);
        if (segment == null) {
            segment = new DefaultMappedFile(path, size);
            segments.put(path, segment);
        }
        segment.setWrotePosition(0);
        CommitLog log = store.getCommitLog();
        PutMessageLock lock = (PutMessageLock) field(CommitLog.class, "putMessageLock", log);
        AppendMessageCallback callback = (AppendMessageCallback) field(CommitLog.class, "appendMessageCallback", log);
        MessageExtEncoder encoder = new MessageExtEncoder(store.getMessageStoreConfig());
        int passes = job.getIntValue("passes");
        long begin = Main.now();
        append(segment, encoder, callback, lock, passes);
        answer.put("nanos", Main.now() - begin);
        answer.put("end", segment.getWrotePosition());
    }

    private void append(DefaultMappedFile segment, MessageExtEncoder encoder, AppendMessageCallback callback,
                        PutMessageLock lock, int passes) {
        PutMessageContext context = new PutMessageContext("");
        long queueOffset = 0;
        for (int pass = 0; pass < passes; pass++) {
            for (MessageExtBrokerInner message : messages) {
                message.setQueueOffset(queueOffset++);
                message.setBodyCRC(UtilAll.crc32(message.getBody()));
                if (encoder.encode(message) != null) {
                    throw new IllegalStateException("message is not legal");
                }
                message.setEncodedBuff(encoder.getEncoderBuffer());
                lock.lock();
                try {
                    AppendMessageResult result = segment.appendMessage(message, callback, context);
                    if (!result.isOk()) {
                        throw new IllegalStateException(result.toString());
                    }
                } finally {
                    lock.unlock();
                }
                message.setEncodedBuff(null);
            }
        }
    }

    /** Unmaps the file of appends. */
    void forget(JSONObject job) {
        DefaultMappedFile segment = segments.remove(job.getString("file"));
        if (segment != null) {
            segment.shutdown(0);
        }
    }

    /** CommitLog#checkMessageAndReturnSize of every record of {@code log} up to {@code end}. Answers how many. */
    void scan(JSONObject job, JSONObject answer) throws Exception {
        ByteBuffer bytes = records(job);
        CommitLog log = store(job).getCommitLog();
        long begin = Main.now();
        int count = scan(log, bytes);
        answer.put("nanos", Main.now() - begin);
        answer.put("count", count);
    }

    private static int scan(CommitLog log, ByteBuffer bytes) {
        int count = 0;
        for (; bytes.hasRemaining(); count++) {
            DispatchRequest request = log.checkMessageAndReturnSize(bytes, true, false, true);
            if (!request.isSuccess()) {
                throw new IllegalStateException(request.toString());
            }
        }
        return count;
    }

    /**
     * ReputMessageService#doReput of every record of {@code log} into queue and index of a new store at {@code store}.
     * The first {@code warm} bytes of the index file are in memory.
     */
    void dispatch(JSONObject job, JSONObject answer) throws Exception {
        ByteBuffer bytes = records(job);
        DefaultMessageStore store = store(job);
        IndexService index = (IndexService) field(DefaultMessageStore.class, "indexService", store);
        ByteBuffer pages = (ByteBuffer) field(IndexFile.class, "mappedByteBuffer", index.getAndCreateLastIndexFile());
        for (int at = 0; at < job.getIntValue("warm"); at += PAGE) {
            pages.put(at, (byte) 0);
        }
        long begin = Main.now();
        int count = dispatch(store, bytes);
        answer.put("nanos", Main.now() - begin);
        answer.put("count", count);
        stores.remove(job.getString("store")).destroy();
    }

    private static int dispatch(DefaultMessageStore store, ByteBuffer bytes) throws Exception {
        CommitLog log = store.getCommitLog();
        int count = 0;
        for (; bytes.hasRemaining(); count++) {
            DispatchRequest request = log.checkMessageAndReturnSize(bytes, false, false, false);
            if (!request.isSuccess()) {
                throw new IllegalStateException(request.toString());
            }
            store.doDispatch(request);
        }
        return count;
    }

    private ByteBuffer records(JSONObject job) {
        ByteBuffer bytes = logs.computeIfAbsent(job.getString("log"), LogRounds::map).duplicate();
        return bytes.limit(job.getIntValue("end"));
    }

    /** Lets go of a log; the garbage collector unmaps it. */
    void unmap(JSONObject job) {
        logs.remove(job.getString("log"));
    }

    private DefaultMessageStore store(JSONObject job) throws Exception {
        String path = job.getString("store");
        DefaultMessageStore store = stores.get(path);
        if (store == null) {
            MessageStoreConfig config = new MessageStoreConfig();
            config.setStorePathRootDir(path);
            config.setStorePathCommitLog(path + "/commitlog");
            config.setHaListenPort(0);
            config.setPutConsumeQueueDataByFileChannel(false); // not its default, but the faster way
            store = new DefaultMessageStore(config, new BrokerStatsManager("bench", false),
                (topic, queueId, offset, tagsCode, time, bitMap, properties) -> { }, new BrokerConfig(),
                new ConcurrentHashMap<>());
            if (!store.load()) {
                throw new IllegalStateException(path);
            }
            stores.put(path, store);
        }
        return store;
    }

    private static ByteBuffer map(String path) {
        try (FileChannel channel = FileChannel.open(Path.of(path), StandardOpenOption.READ)) {
            return channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size());
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
    }

    private static Object field(Class<?> owner, String name, Object of) throws ReflectiveOperationException {
        Field field = owner.getDeclaredField(name);
        field.setAccessible(true);
        return field.get(of);
    }
}
